"""Write a flat graph as instances of regions.

    assemble(flat, stacks, segments)   segments with equal forms become one region
    fingerprint(folded)                a hash of everything but messages

Floats that are equal in all instances of a region stay in its ops; only those that differ become
holes, bound per instance.
"""

import hashlib
import os
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import replace

from meshfold.ir.op_graph import (
    Arg,
    FoldedGraph,
    Hole,
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
)
from meshfold.passes.fold.canonical_form import Segment

_CALL = re.compile(r"@\d+")


def assemble(
    flat: FoldedGraph, stacks: Sequence[tuple[str, ...]], segments: Sequence[Segment]
) -> FoldedGraph:
    """The folded graph in which each segment, in order, is an instance."""
    graph = flat.regions[0].graph
    binder = _Binder(flat, segments)
    members: dict[object, list[int]] = {}
    for k, segment in enumerate(segments):
        members.setdefault(segment.form, []).append(k)
    regions: list[Region] = []
    instances: dict[int, Instance] = {}
    for form_members in members.values():
        own = [segments[k] for k in form_members]
        holes = _varying_floats(own)
        scopes = [common_scope(stacks[s.start : s.stop]) for s in own]
        region = _region_graph(graph, own[0], holes, binder.sources(own[0]), scopes[0])
        for k, segment, scope in zip(form_members, own, scopes, strict=True):
            floats = tuple(segment.floats[h] for h in holes)
            instances[k] = Instance(len(regions), scope, binder.sources(segment), floats)
        regions.append(Region(region_name(len(regions)), region))
    return replace(
        flat,
        regions=tuple(regions),
        instances=tuple(instances[k] for k in range(len(segments))),
        outputs=tuple(binder.output(out) for out in flat.outputs),
    )


def region_name(number: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    letters = ""
    number += 1
    while number:
        number, letter = divmod(number - 1, len(string.ascii_uppercase))
        letters = string.ascii_uppercase[letter] + letters
    return letters


def common_scope(stacks: Sequence[tuple[str, ...]]) -> str:
    """The innermost module that called all these ops, "" for the model itself."""
    shared = os.path.commonprefix([list(stack) for stack in stacks]) if stacks else []
    return _CALL.sub("", shared[-1]) if shared else ""


def relative_name(name: str, scope: str) -> str:
    """`name` as seen from `scope`; unchanged if it lies outside."""
    if name == scope:
        return ""
    return name.removeprefix(scope + ".") if scope else name


class _Binder:
    """Where values of the flat graph come from in the folded one."""

    def __init__(self, flat: FoldedGraph, segments: Sequence[Segment]) -> None:
        self.flat = flat
        self.made = {
            value: Source(SourceKind.VALUE, instance=k, output=output)
            for k, segment in enumerate(segments)
            for output, value in enumerate(segment.outputs)
        }

    def source(self, value: int) -> Source:
        leaves = self.flat.instances[0].sources
        return leaves[value] if value < len(leaves) else self.made[value]

    def sources(self, segment: Segment) -> tuple[Source, ...]:
        return tuple(map(self.source, segment.slots))

    def output(self, info: OutputInfo) -> OutputInfo:
        value = self.flat.regions[0].graph.outputs[info.source.output]
        return replace(info, source=self.source(value))


def _varying_floats(segments: Sequence[Segment]) -> tuple[int, ...]:
    """Numbers of the floats that differ between instances (by text: nan equals itself)."""
    texts = [tuple(map(repr, s.floats)) for s in segments]
    return tuple(k for k, column in enumerate(zip(*texts, strict=True)) if len(set(column)) > 1)


def _region_graph(
    flat: OpGraph,
    segment: Segment,
    holes: tuple[int, ...],
    sources: tuple[Source, ...],
    scope: str,
) -> OpGraph:
    number = {v: k for k, v in enumerate((*segment.slots, *segment.locals))}
    hole_of = {h: k for k, h in enumerate(holes)}
    floats = iter(range(len(segment.floats)))

    def rewrite(arg: Arg) -> Arg:
        if isinstance(arg, float):
            position = next(floats)
            return Hole(hole_of[position]) if position in hole_of else arg
        return Ref(number[arg.index]) if isinstance(arg, Ref) else arg

    ops = tuple(
        rewrite_op(op, rewrite, number, relative_name(_CALL.sub("", op.scope), scope))
        for op in flat.ops[segment.start : segment.stop]
    )
    return OpGraph(
        tuple(slot_of(source, scope) for source in sources),
        tuple(flat.values[v] for v in number),
        ops,
        tuple(number[v] for v in segment.outputs),
        tuple((number[slot], number[v]) for slot, v in segment.mutations),
    )


def slot_of(source: Source, scope: str) -> Slot:
    if source.kind is SourceKind.VALUE or source.kind is SourceKind.INPUT:
        return Slot(SlotKind.VALUE, source.name)
    return Slot(SlotKind(source.kind.value), relative_name(source.name, scope))


def rewrite_op(op: Op, rewrite: Callable[[Arg], Arg], number: dict[int, int], scope: str) -> Op:
    """`op` with every leaf argument rewritten and its outputs renumbered."""

    def walk(arg: Arg) -> Arg:
        return tuple(map(walk, arg)) if isinstance(arg, tuple) else rewrite(arg)

    return Op(
        op.target,
        tuple(map(walk, op.args)),
        tuple((name, walk(arg)) for name, arg in op.kwargs),
        tuple(number[v] for v in op.outputs),
        scope,
        op.source,
        custom=op.custom,
    )


def fingerprint(folded: FoldedGraph) -> str:
    """64 hex digits over the program: regions, bindings, parameters, inputs, outputs. Messages
    (scopes of ops, source lines, notes) do not count."""
    text = "\n".join(
        map(
            repr,
            (
                *((r.name, _graph_facts(r.graph)) for r in folded.regions),
                *((i.region, i.sources, i.floats) for i in folded.instances),
                folded.parameters,
                folded.buffers,
                folded.inputs,
                folded.outputs,
            ),
        )
    )
    return hashlib.sha256(text.encode()).hexdigest()


def graph_fingerprint(graph: OpGraph) -> str:
    """64 hex digits over one region's graph, floats included."""
    return hashlib.sha256(repr(_graph_facts(graph)).encode()).hexdigest()


def _graph_facts(graph: OpGraph) -> tuple[object, ...]:
    ops = tuple(
        (op.target, op.args, op.kwargs, op.outputs, *(op.custom.facts if op.custom else ()))
        for op in graph.ops
    )
    return graph.slots, graph.values, ops, graph.outputs, graph.mutations
