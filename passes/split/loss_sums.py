"""The loss of a step in microbatches, summed over the ranks of dp once.

Every rank of dp makes a summand of the loss of every microbatch. Nothing in a step needs their sum,
whose gradient is one on all ranks; so a microbatch leaves its loss a pending sum on the axis (types
of meshfold.ir.spmd), the runner adds up what a rank has, and the ranks add up their sums once, at
the end (compiler/runtime/pipeline_runner.py).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from meshfold.ir.mesh import DATA_AXIS, Mesh
from meshfold.ir.op_graph import FoldedGraph, OpGraph, SourceKind
from meshfold.ir.spmd import PARTIAL, Layout
from meshfold.ir.strategy import OpTyping, RegionTyping
from meshfold.passes.graph.typed import layouts_of_values
from meshfold.passes.rules.table import AxisRule, region_rules

T = TypeVar("T")

LossPlace = tuple[int, int]
"""(region, number of its output)."""


def loss_place(folded: FoldedGraph) -> LossPlace | None:
    """Where the loss is made; None where there is none, or something else reads it."""
    source = folded.outputs[0].source
    if not folded.returns.has_loss or source.kind is not SourceKind.VALUE:
        return None
    place = folded.instances[source.instance].region, source.output
    read = [s for instance in folded.instances for s in instance.sources]
    read += [output.source for output in folded.outputs[1:]]
    for other in read:
        if other.kind is SourceKind.VALUE:
            if (folded.instances[other.instance].region, other.output) == place:
                return None
    return place


def with_pending_loss(
    graph: OpGraph, typing: RegionTyping, output: int, mesh: Mesh
) -> RegionTyping:
    """`typing` with the loss left a pending sum on dp where its op makes one; ops behind it that
    may run on summands do (a division by the number of microbatches). Else as it is."""
    if DATA_AXIS not in mesh.names:
        return typing
    at = mesh.names.index(DATA_AXIS)
    value = graph.outputs[output]
    natives = [native for native, _ in layouts_of_values(graph, typing)]
    ops = list(typing.ops)
    rules = region_rules(graph, (mesh.sizes[at],))
    while natives[value][at] != PARTIAL:
        if value < len(graph.slots) or _num_readers(graph, value) > 1:
            return typing
        k = graph.producers[value]
        rule = _on_summands(rules[k][0])
        if rule is None:
            return typing
        chosen = ops[k]
        ops[k] = OpTyping(
            _with(chosen.rules, at, rule),
            tuple(_with(x, at, PARTIAL) for x in chosen.inputs),
            tuple(_with(x, at, PARTIAL) for x in chosen.outputs),
        )
        (value,) = graph.ops[k].operands
    outputs = list(typing.outputs)
    outputs[output] = _with(outputs[output], at, PARTIAL)
    return replace(typing, ops=tuple(ops), outputs=tuple(outputs))


def _on_summands(rules: Sequence[AxisRule]) -> str | None:
    """The rule by which an op of one operand makes summands of its result of summands, if any."""
    for rule in rules:
        if rule.inputs == (PARTIAL,) and rule.outputs == (PARTIAL,) and not rule.comm:
            return rule.name
    return None


def _num_readers(graph: OpGraph, value: int) -> int:
    """How often ops and outputs read a value."""
    return sum(op.operands.count(value) for op in graph.ops) + graph.outputs.count(value)


def _with(entries: tuple[T, ...], at: int, entry: T) -> tuple[T, ...]:
    return *entries[:at], entry, *entries[at + 1 :]


def pending_axes(layout: Layout, names: Sequence[str]) -> tuple[str, ...]:
    """The axes on which `layout` is a pending sum."""
    return tuple(name for name, t in zip(names, layout, strict=True) if t == PARTIAL)
