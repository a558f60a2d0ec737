"""Where a chunked region (meshfold.passes.split.chunk_graph) splits a value into chunks, or joins
one at its end.

    x -> unflatten, unbind, reshape -> x0, x1        a slot that nothing reads unsplit
    y <- reshape, stack, reshape    <- y0, y1        an output that nothing reads here

What one region joins and the next splits in the same way can stay in chunks in between.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from meshfold.ir.op_graph import OpGraph, SlotKind
from meshfold.ir.spmd import Layout
from meshfold.ir.strategy import RegionTyping
from meshfold.passes.split.chunk_graph import RESHAPE, STACK, UNBIND, UNFLATTEN

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ChunkLayout:
    """How a value is split into chunks."""

    shape: Shape
    """Of the value."""
    stacked: Shape
    """Of the value with the chunks as a dim."""
    dim: int
    """The number of that dim."""
    chunk: Shape
    """Of one chunk."""
    layout: Layout
    """Of the value."""
    chunk_layout: Layout


@dataclass(frozen=True)
class ChunkedValue:
    """A value that is split or joined. ops: what does that."""

    ops: frozenset[int]
    chunks: ChunkLayout


def split_slots(graph: OpGraph, typing: RegionTyping) -> dict[int, ChunkedValue]:
    """The slots of a region that it splits, by number."""
    slots = [v for v, slot in enumerate(graph.slots) if slot.kind is not SlotKind.PARAMETER]
    found = {v: _split(graph, typing, v) for v in slots}
    return {v: value for v, value in found.items() if value is not None}


def joined_outputs(graph: OpGraph, typing: RegionTyping) -> dict[int, ChunkedValue]:
    """The outputs of a region that it joins, by number."""
    once = [n for n, v in enumerate(graph.outputs) if graph.outputs.count(v) == 1]
    found = {n: _joined(graph, typing, graph.outputs[n]) for n in once}
    return {n: value for n, value in found.items() if value is not None}


def _split(graph: OpGraph, typing: RegionTyping, v: int) -> ChunkedValue | None:
    if v in graph.outputs or v in (updated for _, updated in graph.mutations):
        return None
    first = _only(graph.users[v])
    if first is None or graph.ops[first].target != UNFLATTEN:
        return None
    stacked = graph.ops[first].outputs[0]
    second = _only(graph.users[stacked])
    if second is None or graph.ops[second].target != UNBIND:
        return None
    thirds = [_only(graph.users[chunk]) for chunk in graph.ops[second].outputs]
    if any(k is None or graph.ops[k].target != RESHAPE for k in thirds):
        return None
    reshapes = [k for k in thirds if k is not None]
    (dim,) = (arg for arg in graph.ops[second].args if isinstance(arg, int))
    shapes = _shapes(graph, v, stacked, dim, graph.ops[reshapes[0]].outputs[0])
    layouts = typing.ops[first].inputs[0], typing.ops[reshapes[0]].outputs[0]
    return ChunkedValue(frozenset((first, second, *reshapes)), ChunkLayout(*shapes, *layouts))


def _joined(graph: OpGraph, typing: RegionTyping, v: int) -> ChunkedValue | None:
    last = graph.producers[v]
    if graph.users[v] or last < 0 or graph.ops[last].target != RESHAPE:
        return None
    stacked = graph.ops[last].operands[0]
    second = graph.producers[stacked]
    if second < 0 or graph.ops[second].target != STACK:
        return None
    chunks = graph.ops[second].operands
    reshapes = [graph.producers[chunk] for chunk in chunks]
    if any(k < 0 or graph.ops[k].target != RESHAPE for k in reshapes):
        return None
    if any(_only(graph.users[chunk]) != second for chunk in chunks):
        return None
    (dim,) = (arg for arg in graph.ops[second].args if isinstance(arg, int))
    shapes = _shapes(graph, v, stacked, dim, graph.ops[reshapes[0]].operands[0])
    layouts = typing.ops[last].outputs[0], typing.ops[reshapes[0]].inputs[0]
    return ChunkedValue(frozenset((last, second, *reshapes)), ChunkLayout(*shapes, *layouts))


def _only(users: Iterable[int]) -> int | None:
    found = list(users)
    return found[0] if len(found) == 1 else None


def _shapes(
    graph: OpGraph, v: int, stacked: int, dim: int, chunk: int
) -> tuple[Shape, Shape, int, Shape]:
    values = graph.values
    return values[v].shape, values[stacked].shape, dim, values[chunk].shape
