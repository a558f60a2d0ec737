"""What a typing says of the values of a region's graph."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from meshfold.ir.op_graph import FoldedGraph, OpGraph, Source, SourceKind
from meshfold.ir.spmd import Layout
from meshfold.ir.strategy import RegionTyping


def layouts_of_values(
    graph: OpGraph, typing: RegionTyping
) -> list[tuple[Layout, tuple[Layout, ...]]]:
    """The native layout of every value and the distinct layouts that ops, outputs and mutated
    buffers demand of it, in order of first use."""
    native = [*typing.slots, *([()] * (len(graph.values) - len(graph.slots)))]
    demands: list[dict[Layout, None]] = [{} for _ in graph.values]
    for op, chosen in zip(graph.ops, typing.ops, strict=True):
        for v, layout in zip(op.operands, chosen.inputs, strict=True):
            demands[v][layout] = None
        for v, layout in zip(op.outputs, chosen.outputs, strict=True):
            native[v] = layout
    for v, layout in zip(graph.outputs, typing.outputs, strict=True):
        demands[v][layout] = None
    for slot, v in graph.mutations:
        demands[v][typing.slots[slot]] = None
    return [(n, tuple(d)) for n, d in zip(native, demands, strict=True)]


def arriving_layouts(
    folded: FoldedGraph,
    typings: Sequence[RegionTyping],
    boundary: Mapping[str, Layout] = MappingProxyType({}),
) -> list[tuple[Layout, ...]]:
    """The layout in which each slot's value arrives, per instance: what its producer gives.

    typings: one per region. boundary: in a pipeline stage the layout of what arrives from the stage
    before, by name.
    """

    def arrival(source: Source, declared: Layout) -> Layout:
        if source.kind is SourceKind.VALUE:
            return typings[folded.instances[source.instance].region].outputs[source.output]
        return boundary[source.name] if source.kind is SourceKind.BOUNDARY else declared

    return [
        tuple(map(arrival, instance.sources, typings[instance.region].slots))
        for instance in folded.instances
    ]


def value_name(graph: OpGraph, v: int) -> str:
    """How people read a value: the slot's name, else the op that made it."""
    if v < len(graph.slots):
        return graph.slots[v].name or f"slot {v}"
    op = graph.ops[graph.producers[v]]
    target = op.target.removeprefix("aten.").removesuffix(".default")
    return f"{op.scope}.{target}" if op.scope else target
