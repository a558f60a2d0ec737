"""A captured program on its way to the op graph: ops over values known by key.

A key is the name of an fx node (with "#k" for the k-th of several results), or a Source for what
comes from outside. Call nodes are expanded on this form; `number` then drops what the outputs do
not need and numbers the rest into a flat op graph.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from meshfold.capture.trace.fake_model import Names
from meshfold.ir.custom_ops import CustomOp
from meshfold.ir.op_graph import (
    DRAWS,
    Arg,
    Dependence,
    FoldedGraph,
    InputInfo,
    Instance,
    Op,
    OpGraph,
    OutputInfo,
    Ref,
    Region,
    Slot,
    SlotKind,
    Source,
    SourceKind,
    Value,
)

Key = str | Source

_SLOT_KINDS = {
    SourceKind.PARAMETER: SlotKind.PARAMETER,
    SourceKind.BUFFER: SlotKind.BUFFER,
    SourceKind.CONSTANT: SlotKind.CONSTANT,
    SourceKind.INPUT: SlotKind.VALUE,
    SourceKind.VALUE: SlotKind.VALUE,
}

_LEAF_DEPENDENCE = {
    SourceKind.PARAMETER: Dependence.PARAMETER,
    SourceKind.BUFFER: Dependence.CONSTANT,
    SourceKind.CONSTANT: Dependence.CONSTANT,
    SourceKind.INPUT: Dependence.BATCH,
}

_STRENGTH = (Dependence.CONSTANT, Dependence.PARAMETER, Dependence.BATCH)

SHAPE_ONLY = frozenset(
    f"aten.{name}.default"
    for name in (
        "ones_like",
        "zeros_like",
        "full_like",
        "empty_like",
    )
)
"""Ops that read their tensor operand's shape and dtype only: nothing flows through them."""


WITH_STATISTICS = frozenset(
    f"aten._native_batch_norm_legit{name}"
    for name in ("_functional.default", ".no_stats", "_no_training.default")
)
"""Ops whose results after the first are statistics, through which no gradient flows."""


@dataclass(frozen=True, slots=True)
class Operand:
    """An argument that is a value of the program."""

    key: Key


RawArg = Any
"""An Arg with Operand in place of Ref."""


@dataclass(frozen=True, slots=True)
class RawOp:
    """One op. `stack` is the chain of module scopes it was called in, outermost first."""

    target: str
    args: tuple[RawArg, ...]
    kwargs: tuple[tuple[str, RawArg], ...]
    outputs: tuple[str, ...]
    stack: tuple[str, ...]
    source: str
    custom: CustomOp | None = None
    operands: tuple[Key, ...] = field(init=False, repr=False, compare=False)
    """Values that it reads, in the order of its arguments."""

    def __post_init__(self) -> None:
        given = (*self.args, *(value for _, value in self.kwargs))
        object.__setattr__(self, "operands", tuple(key for arg in given for key in _keys(arg)))


def _keys(arg: RawArg) -> Iterator[Key]:
    if isinstance(arg, Operand):
        yield arg.key
    elif isinstance(arg, tuple):
        for child in arg:
            yield from _keys(child)


@dataclass
class RawProgram:
    """`values` describes every key; `mutations` are (buffer name, key of its new value); `marked`
    are outputs without a name, which nobody computes."""

    ops: list[RawOp] = field(default_factory=list)
    values: dict[Key, Value] = field(default_factory=dict)
    outputs: list[tuple[str, Key]] = field(default_factory=list)
    mutations: list[tuple[str, Key]] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    marked: list[Key] = field(default_factory=list)


@dataclass(frozen=True)
class Flat:
    """A FoldedGraph of one region, and per op the chain of module scopes it was called in."""

    graph: FoldedGraph
    stacks: tuple[tuple[str, ...], ...]


def number(
    program: RawProgram, names: Names, inputs: tuple[InputInfo, ...], notes: Sequence[str]
) -> Flat:
    """The flat op graph of what the outputs and the buffer updates need."""
    ops = _live_ops(program)
    wanted = [key for _, key in (*program.outputs, *program.mutations)]
    leaves = dict.fromkeys(k for op in ops for k in op.operands if isinstance(k, Source))
    leaves.update(dict.fromkeys(k for k in wanted if isinstance(k, Source)))
    for buffer, _ in program.mutations:
        leaves.setdefault(names.sources[buffer])
    numbering = _Numbering(program, names, tuple(leaves))
    for op in ops:
        numbering.add(op)
    graph = numbering.graph(wanted)
    outputs = tuple(
        OutputInfo(
            name,
            Source(SourceKind.VALUE, instance=0, output=graph.outputs.index(numbering.index[key])),
            program.values[key].shape,
            program.values[key].dtype,
        )
        for name, key in program.outputs
    )
    used = {leaf.name for leaf in leaves if leaf.kind is SourceKind.PARAMETER}
    unused = [p.name for p in names.parameters if p.name not in used]
    if unused:
        notes = [*notes, f"parameters that no op reads, so without gradient: {', '.join(unused)}"]
    folded = FoldedGraph(
        regions=(Region("A", graph),),
        instances=(Instance(0, "", tuple(leaves)),),
        parameters=tuple(replace(p, used=p.name in used) for p in names.parameters),
        buffers=names.buffers,
        inputs=inputs,
        outputs=outputs,
        notes=tuple(notes),
    )
    return Flat(folded, tuple(op.stack for op in ops))


def _live_ops(program: RawProgram) -> list[RawOp]:
    """Ops that an output or a buffer update needs, in order."""
    needed = {key for _, key in (*program.outputs, *program.mutations)}
    live = []
    for op in reversed(program.ops):
        if not needed.isdisjoint(op.outputs):
            needed.update(op.operands)
            live.append(op)
    return live[::-1]


class _Numbering:
    """Builds the flat OpGraph: what each value depends on, whether a gradient flows."""

    def __init__(self, program: RawProgram, names: Names, leaves: tuple[Source, ...]) -> None:
        self.program = program
        self.index: dict[Key, int] = {key: k for k, key in enumerate(leaves)}
        trained = {p.name for p in names.parameters if p.requires_grad}
        masters = {p.name: p.dtype for p in names.parameters if p.name in names.masters}
        self.slots = tuple(Slot(_SLOT_KINDS[leaf.kind], leaf.name) for leaf in leaves)
        self.values = [
            replace(
                program.values.get(leaf) or _buffer_value(names, leaf.name),
                requires_grad=leaf.kind is SourceKind.PARAMETER and leaf.name in trained,
                depends=_LEAF_DEPENDENCE[leaf.kind],
                master=masters.get(leaf.name, "") if leaf.kind is SourceKind.PARAMETER else "",
            )
            for leaf in leaves
        ]
        self.ops: list[Op] = []

    def add(self, raw: RawOp) -> None:
        operands = [self.values[self.index[key]] for key in raw.operands]
        if raw.target in SHAPE_ONLY:
            operands = []
        flows = any(v.requires_grad for v in operands) and raw.target != "aten.detach.default"
        depends = max((v.depends for v in operands), key=_STRENGTH.index, default=_STRENGTH[0])
        if raw.target in DRAWS:
            depends = Dependence.BATCH
        for k, key in enumerate(raw.outputs):
            value = self.program.values[key]
            self.index[key] = len(self.values)
            trained = flows and value.is_float and not (k and raw.target in WITH_STATISTICS)
            trained = trained and not (raw.custom and k in raw.custom.untrained)
            self.values.append(replace(value, requires_grad=trained, depends=depends))
        self.ops.append(
            Op(
                raw.target,
                tuple(map(self._arg, raw.args)),
                tuple((name, self._arg(arg)) for name, arg in raw.kwargs),
                tuple(self.index[key] for key in raw.outputs),
                raw.stack[-1] if raw.stack else "",
                raw.source,
                custom=raw.custom,
            )
        )

    def _arg(self, arg: RawArg) -> Arg:
        if isinstance(arg, Operand):
            return Ref(self.index[arg.key])
        return tuple(map(self._arg, arg)) if isinstance(arg, tuple) else arg

    def graph(self, wanted: Iterable[Key]) -> OpGraph:
        updates = []
        for buffer, key in self.program.mutations:
            updates.append((self.index[Source(SourceKind.BUFFER, buffer)], self.index[key]))
        outputs = dict.fromkeys(self.index[key] for _, key in self.program.outputs)
        return OpGraph(
            self.slots, tuple(self.values), tuple(self.ops), tuple(outputs), tuple(updates)
        )


def _buffer_value(names: Names, name: str) -> Value:
    info = next(b for b in names.buffers if b.name == name)
    return Value(info.shape, info.dtype)
