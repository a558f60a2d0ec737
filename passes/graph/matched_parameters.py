"""Which parameters and buffers one program reads where another reads its own.

Two captures of a model, with shared layers and without, run the same ops on the same values; only
what they read of the model has other names. Both are compared op by op in execution order, whatever
regions they were folded into.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from meshfold.errors import OptionError
from meshfold.ir.op_graph import Arg, FoldedGraph, Hole, Instance, Op, Ref, SourceKind, Value

_NAMED = {SourceKind.PARAMETER, SourceKind.BUFFER}
_REMEDY = "give the same model twice, with its layers shared and not"


class _Read(NamedTuple):
    """An operand: what kind of source it has, what it is, its name or number. name: of what the
    model stores, which is not compared."""

    kind: str
    shape: tuple[int, ...]
    dtype: str
    number: int | str
    name: str = ""


@dataclass(frozen=True)
class _Call:
    """One op, operands resolved. what: all that has to be equal; names: stored tensors read."""

    what: tuple[object, ...]
    names: tuple[str, ...]
    where: str


def matched_parameters(shared: FoldedGraph, other: FoldedGraph) -> dict[str, str]:
    """First name of every parameter and buffer that `other` reads -> that of the one in its place
    in `shared`.

    Raises OptionError where the programs differ in more than these names, or where `shared` has
    several in the places of one.
    """
    found: dict[str, str] = {}
    calls, others = list(_calls(shared)), list(_calls(other))
    for number, (a, b) in enumerate(zip(calls, others, strict=False)):
        if a.what != b.what:
            raise OptionError(
                f"the models run different ops: number {number} is {a.where} where layers are "
                f"shared, and {b.where} where they are not; {_REMEDY}"
            )
        for name, theirs in zip(b.names, a.names, strict=True):
            if found.setdefault(name, theirs) != theirs:
                raise OptionError(
                    f"{name} stands in the places of both {found[name]} and {theirs}, so which of "
                    f"them it becomes is unknown; {_REMEDY}"
                )
    if len(calls) != len(others):
        raise OptionError(
            f"the models run {len(calls)} ops where layers are shared, and {len(others)} where "
            f"they are not; {_REMEDY}"
        )
    return found


def _calls(folded: FoldedGraph) -> Iterator[_Call]:
    made: dict[tuple[int, int], _Read] = {}
    """By instance and output."""
    count = 0
    for k, instance in enumerate(folded.instances):
        graph = folded.regions[instance.region].graph
        reads = {
            i: _read(instance, i, graph.values[i], made) for i, _ in enumerate(instance.sources)
        }
        for op in graph.ops:
            yield _call(op, instance, reads)
            for v in op.outputs:
                value = graph.values[v]
                reads[v] = _Read("value", value.shape, value.dtype, count)
                count += 1
        made |= {(k, output): reads[v] for output, v in enumerate(graph.outputs)}
        for slot, v in graph.mutations:
            # A buffer's new value: the same in both programs, in place of the same buffer.
            yield _Call(("updates", reads[v][:4]), (instance.sources[slot].name,), "an update")
    sources = [info.source for info in folded.outputs]
    returned = [made[s.instance, s.output][:4] for s in sources if s.kind is SourceKind.VALUE]
    yield _Call(("returns", tuple(returned)), (), "what it returns")


def _read(
    instance: Instance, slot: int, value: Value, made: Mapping[tuple[int, int], _Read]
) -> _Read:
    source = instance.sources[slot]
    if source.kind is SourceKind.VALUE:
        return made[source.instance, source.output]
    if source.kind in _NAMED:
        return _Read(source.kind, value.shape, value.stored_dtype, "", source.name)
    number = source.name if source.kind is SourceKind.INPUT else ""
    return _Read(source.kind, value.shape, value.dtype, number)


def _call(op: Op, instance: Instance, reads: Mapping[int, _Read]) -> _Call:
    names: list[str] = []

    def resolved(arg: Arg) -> object:
        if isinstance(arg, tuple):
            return tuple(map(resolved, arg))
        if isinstance(arg, Hole):
            return instance.floats[arg.index]
        if not isinstance(arg, Ref):
            return type(arg), arg
        read = reads[arg.index]
        if read.name:
            names.append(read.name)
        return read[:4]

    args = tuple(map(resolved, op.args))
    kwargs = tuple((name, resolved(value)) for name, value in op.kwargs)
    where = f"{op.target} in {instance.scope or 'the model'}"
    return _Call((op.target, args, kwargs, len(op.outputs), op.draw), tuple(names), where)
