"""What a typing says of the values of a region's graph."""

from collections.abc import Sequence

from meshfold.ir.op_graph import OpGraph
from meshfold.ir.spmd import Layout
from meshfold.ir.strategy import RegionTyping


def layouts_of_values(
    graph: OpGraph, typing: RegionTyping
) -> list[tuple[Layout, tuple[Layout, ...]]]:
    """Per value its native layout and the distinct layouts that ops and outputs demand of it, in
    order of first use."""
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


def wanted_layouts(
    graph: OpGraph, typing: RegionTyping, arriving: Sequence[Layout]
) -> list[list[Layout]]:
    """The layouts that ops, outputs and mutated buffers want of each value, in order. arriving:
    of each slot the layout in which its value arrives."""
    wanted: list[list[Layout]] = [[] for _ in graph.values]
    for op, chosen in zip(graph.ops, typing.ops, strict=True):
        for v, layout in zip(op.operands, chosen.inputs, strict=True):
            wanted[v].append(layout)
    for v, layout in zip(graph.outputs, typing.outputs, strict=True):
        wanted[v].append(layout)
    for slot, v in graph.mutations:
        wanted[v].append(arriving[slot])
    return wanted


def value_name(graph: OpGraph, v: int) -> str:
    """How people read a value: the slot's name, else the op that made it."""
    if v < len(graph.slots):
        return graph.slots[v].name or f"slot {v}"
    op = graph.ops[graph.producers[v]]
    target = op.target.removeprefix("aten.").removesuffix(".default")
    return f"{op.scope}.{target}" if op.scope else target
