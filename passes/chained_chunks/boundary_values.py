"""Where a region in parts (passes/parts_graph.py) takes a value apart, or joins one at its end.

    x -> unflatten, unbind, reshape -> x0, x1        a slot that nothing reads whole
    y <- reshape, stack, reshape    <- y0, y1        an output that nothing reads here

What one region joins and the next takes apart in the same way need not be whole in between.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from meshfold.ir.op_graph import OpGraph, SlotKind
from meshfold.ir.spmd import Layout
from meshfold.ir.strategy import RegionTyping
from meshfold.passes.split.chunk_graph import RESHAPE, STACK, UNBIND, UNFLATTEN

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PartsOfValue:
    """How a value is cut. whole, stacked: its shape, and that with parts as a dim, number `dim`;
    layout, of_part: of the value, and of a part of this shape."""

    whole: Shape
    stacked: Shape
    dim: int
    part: Shape
    layout: Layout
    of_part: Layout


@dataclass(frozen=True)
class PartsCut:
    """ops: what takes a value apart, or joins it."""

    ops: frozenset[int]
    of: PartsOfValue


def taken_apart(graph: OpGraph, typing: RegionTyping) -> dict[int, PartsCut]:
    """The slots of a region that it takes apart, by number."""
    slots = [v for v, slot in enumerate(graph.slots) if slot.kind is not SlotKind.PARAMETER]
    found = {v: _taken(graph, typing, v) for v in slots}
    return {v: cut for v, cut in found.items() if cut is not None}


def joined(graph: OpGraph, typing: RegionTyping) -> dict[int, PartsCut]:
    """The outputs of a region that it joins, by number."""
    once = [n for n, v in enumerate(graph.outputs) if graph.outputs.count(v) == 1]
    found = {n: _joined(graph, typing, graph.outputs[n]) for n in once}
    return {n: cut for n, cut in found.items() if cut is not None}


def _taken(graph: OpGraph, typing: RegionTyping, v: int) -> PartsCut | None:
    if v in graph.outputs or v in (made for _, made in graph.mutations):
        return None
    first = _only(graph.users[v])
    if first is None or graph.ops[first].target != UNFLATTEN:
        return None
    stacked = graph.ops[first].outputs[0]
    second = _only(graph.users[stacked])
    if second is None or graph.ops[second].target != UNBIND:
        return None
    thirds = [_only(graph.users[piece]) for piece in graph.ops[second].outputs]
    if any(k is None or graph.ops[k].target != RESHAPE for k in thirds):
        return None
    reshapes = [k for k in thirds if k is not None]
    (dim,) = (arg for arg in graph.ops[second].args if isinstance(arg, int))
    of = _of_value(graph, v, stacked, dim, graph.ops[reshapes[0]].outputs[0])
    layouts = typing.ops[first].inputs[0], typing.ops[reshapes[0]].outputs[0]
    return PartsCut(frozenset((first, second, *reshapes)), PartsOfValue(*of, *layouts))


def _joined(graph: OpGraph, typing: RegionTyping, v: int) -> PartsCut | None:
    last = graph.producers[v]
    if graph.users[v] or last < 0 or graph.ops[last].target != RESHAPE:
        return None
    stacked = graph.ops[last].operands[0]
    second = graph.producers[stacked]
    if second < 0 or graph.ops[second].target != STACK:
        return None
    pieces = graph.ops[second].operands
    reshapes = [graph.producers[piece] for piece in pieces]
    if any(k < 0 or graph.ops[k].target != RESHAPE for k in reshapes):
        return None
    if any(_only(graph.users[piece]) != second for piece in pieces):
        return None
    (dim,) = (arg for arg in graph.ops[second].args if isinstance(arg, int))
    of = _of_value(graph, v, stacked, dim, graph.ops[reshapes[0]].operands[0])
    layouts = typing.ops[last].outputs[0], typing.ops[reshapes[0]].inputs[0]
    return PartsCut(frozenset((last, second, *reshapes)), PartsOfValue(*of, *layouts))


def _only(users: Iterable[int]) -> int | None:
    found = list(users)
    return found[0] if len(found) == 1 else None


def _of_value(
    graph: OpGraph, v: int, stacked: int, dim: int, part: int
) -> tuple[Shape, Shape, int, Shape]:
    values = graph.values
    return values[v].shape, values[stacked].shape, dim, values[part].shape
