"""The graph of a region in parts, written down from its graph and two typings.

    x -> unflatten, unbind -> x0, x1      ops that see the dim that is cut run once per part
    y <- reshape, stack    <- y0, y1      ops that do not, or need all of it, once

The dim is [blocks, ranks, parts, rest]: ranks cut the second digit, so splitting and joining move
no data between ranks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshfold.ir.op_graph import Arg, Op, OpGraph, Ref, SlotKind
from meshfold.ir.spmd import Layout, SpmdType, local_shape
from meshfold.ir.strategy import OpTyping, RegionTyping
from meshfold.passes.price.region import layouts_of_values
from meshfold.passes.rules.localize import localize
from meshfold.passes.rules.ops.random import draw_of
from meshfold.passes.rules.table import AxisRule, region_rules, rules_inside
from meshfold.passes.split.samples import rebound

UNFLATTEN, UNBIND = "aten.unflatten.int", "aten.unbind.int"
RESHAPE, STACK = "aten.reshape.default", "aten.stack.default"

Shape = tuple[int, ...]


class UncutError(Exception):
    """Why a region cannot run in parts."""


def in_parts(
    graph: OpGraph,
    typing: RegionTyping,
    free: RegionTyping,
    count: int,
    parts: int,
    sizes: tuple[int, ...],
) -> tuple[OpGraph, RegionTyping]:
    """A region in `parts` parts: its graph and typing; slots and outputs are the region's.

    typing: on a mesh of `sizes`; free: on the free axis; count: samples or rows that it cuts.
    Raises UncutError where it does not divide, or no rule does so.
    """
    return PartsWriter(graph, typing, free, count, parts, sizes).written()


@dataclass(frozen=True)
class _Cut:
    """How the dim of a value that has the batch, or the sequence, is cut: [blocks, ranks, parts,
    rest], in this order. type: the shard of the free axis; count: samples, or rows of the sequence;
    sizes: of the mesh."""

    type: SpmdType
    ranks: int
    parts: int
    count: int
    sizes: tuple[int, ...]

    @property
    def above(self) -> int:
        """Blocks of the dim in which the parts lie."""
        return self.type.blocks * self.ranks

    def part(self, layout: Layout) -> Layout:
        """`layout` of a value for one part of it."""
        return tuple(self._of_part(t, n) for t, n in zip(layout, self.sizes, strict=True))

    def _of_part(self, t: SpmdType, size: int) -> SpmdType:
        if not (t.is_shard and t.dim == self.type.dim):
            return t
        if t.padded:
            raise UncutError("the dim that is cut is padded")
        if t.blocks >= self.type.blocks * self.count:
            return replace(t, blocks=t.blocks // self.parts)
        if t.blocks * size > self.above:
            raise UncutError("ranks cut it otherwise")
        return t

    def digits(self, layout: Layout) -> Layout:
        """`layout` of one part where the dim is two: [blocks * ranks, rest]."""
        return self._moved(layout, 1)

    def stacked(self, layout: Layout) -> Layout:
        """`layout` of one part for all together, where the dim is [blocks * ranks, parts, rest]."""
        return self._moved(layout, 2)

    def _moved(self, layout: Layout, added: int) -> Layout:
        types = []
        for t, size in zip(layout, self.sizes, strict=True):
            if t.is_shard and t.dim > self.type.dim:
                t = replace(t, dim=t.dim + added)
            elif t.is_shard and t.dim == self.type.dim and t.blocks * size > self.above:
                t = replace(t, dim=t.dim + added, blocks=t.blocks // self.above)
            types.append(t)
        return tuple(types)

    def shapes(self, whole: Shape) -> tuple[Shape, Shape, Shape]:
        """Of one part, of one with the dim as [blocks * ranks, rest], and of all together."""
        dim = self.type.dim
        before, after = whole[:dim], whole[dim + 1 :]
        rest = whole[dim] // (self.above * self.parts)
        return (
            (*before, self.above * rest, *after),
            (*before, self.above, rest, *after),
            (*before, self.above, self.parts, rest, *after),
        )


class PartsWriter:
    """Writes the graph of a region in parts, see in_parts."""

    def __init__(
        self,
        graph: OpGraph,
        typing: RegionTyping,
        free: RegionTyping,
        count: int,
        parts: int,
        sizes: tuple[int, ...],
    ) -> None:
        self.whole = graph
        self.typing = typing
        self.free = free
        self.count = count
        self.parts = parts
        self.sizes = sizes
        self.native = [layout for layout, _ in layouts_of_values(graph, typing)]
        self.made_as = [layout[0] for layout, _ in layouts_of_values(graph, free)]
        """Type of every value on the free axis."""
        self.ranks = self._ranks()
        if count % (self.ranks * parts):
            raise UncutError(f"{count} do not divide into {parts} parts on {self.ranks} ranks")
        num_slots = len(graph.slots)
        self.values = list(graph.values[:num_slots])
        self.ops: list[Op] = []
        self.typings: list[OpTyping] = []
        self.at: dict[int, int] = {v: v for v in range(num_slots)}
        """What stands for a value as a whole, where there is that."""
        self.of_part: dict[tuple[int, SpmdType], tuple[int, ...]] = {}

    def written(self) -> tuple[OpGraph, RegionTyping]:
        """The finished graph; slots and outputs are those of the region."""
        for k, (op, chosen) in enumerate(zip(self.whole.ops, self.free.ops, strict=True)):
            if any(layout[0].is_shard for layout in chosen.outputs):
                self._run_in_parts(k, op)
            else:
                operands = [self._together(v) for v in op.operands]
                shapes = [self.whole.values[v].shape for v in op.outputs]
                op = replace(op, draw=draw_of(op, k))
                made = self._write(op, op.args, op.kwargs, operands, self.typing.ops[k], shapes)
                self.at.update(zip(op.outputs, made, strict=True))
        pairs = zip(self.whole.outputs, self.typing.outputs, strict=True)
        outputs = tuple(
            self.at[v] if v in self.at else self._joined(v, layout) for v, layout in pairs
        )
        graph = OpGraph(self.whole.slots, tuple(self.values), tuple(self.ops), outputs)
        return graph, replace(self.typing, ops=tuple(self._with_rules(graph)))

    def _ranks(self) -> int:
        """On how many ranks that dim is cut, where it is most."""
        sizes, count = self.sizes, self.count
        axes = {
            axis
            for layout, cut in zip(self.native, self.made_as, strict=True)
            for axis, t in enumerate(layout)
            if cut.is_shard and t.is_shard and t.dim == cut.dim
            if cut.blocks <= t.blocks and t.blocks * sizes[axis] <= cut.blocks * count
        }
        return math.prod(sizes[axis] for axis in axes)

    def _cut(self, free: SpmdType) -> _Cut:
        return _Cut(free, self.ranks, self.parts, self.count, self.sizes)

    def _part_layout(self, free: SpmdType, layout: Layout) -> Layout:
        return self._cut(free).part(layout) if free.is_shard else layout

    def _run_in_parts(self, k: int, op: Op) -> None:
        """An op that sees what is cut, once per part."""
        typing, chosen = self.typing.ops[k], self.free.ops[k]
        args, kwargs = localize(self.whole, k, chosen, (self.parts,))
        reads = [(v, layout[0]) for v, layout in zip(op.operands, chosen.inputs, strict=True)]
        of_part = OpTyping(
            typing.rules,
            tuple(map(self._part_layout, (free for _, free in reads), typing.inputs)),
            tuple(map(self._part_layout, (x[0] for x in chosen.outputs), typing.outputs)),
        )
        shapes = [
            local_shape(self.whole.values[v].shape, layout, (self.parts,))
            for v, layout in zip(op.outputs, chosen.outputs, strict=True)
        ]
        made = []
        for number in range(self.parts):
            operands = [
                self._split(v, free)[number] if free.is_shard else self._together(v)
                for v, free in reads
            ]
            made.append(self._write(op, args, kwargs, operands, of_part, shapes))
        for v, *of_parts in zip(op.outputs, *made, strict=True):
            if self.made_as[v].is_shard:
                self.of_part[v, self.made_as[v]] = tuple(of_parts)
            else:
                self.at[v] = of_parts[0]

    def _split(self, v: int, free: SpmdType) -> tuple[int, ...]:
        """The parts of `v`; of one that is not made in parts, cut as `free` says."""
        if (v, free) in self.of_part:
            return self.of_part[v, free]
        if v < len(self.whole.slots) and self.whole.slots[v].kind is SlotKind.PARAMETER:
            raise UncutError("a parameter would be cut")
        cut, layout, dim = self._cut(free), self.native[v], free.dim
        shape, digits, stacked = cut.shapes(self.whole.values[v].shape)
        local = cut.part(layout)
        apart, of_piece = cut.stacked(local), cut.digits(local)
        arguments = (Ref(0), dim, stacked[dim : dim + 3])
        typing = OpTyping((), (layout,), (apart,))
        (whole,) = self._move(UNFLATTEN, arguments, [self.at[v]], typing, [stacked], v)
        typing = OpTyping((), (apart,), (of_piece,) * self.parts)
        shapes = [digits] * self.parts
        pieces = self._move(UNBIND, (Ref(0), dim + 1), [whole], typing, shapes, v)
        typing = OpTyping((), (of_piece,), (local,))
        self.of_part[v, free] = tuple(
            self._move(RESHAPE, (Ref(0), shape), [piece], typing, [shape], v)[0] for piece in pieces
        )
        return self.of_part[v, free]

    def _together(self, v: int) -> int:
        """`v` as a whole, in the layout in which it is made."""
        if v not in self.at:
            self.at[v] = self._joined(v, self.native[v])
        return self.at[v]

    def _joined(self, v: int, layout: Layout) -> int:
        """All parts of an output, in the layout in which it leaves."""
        cut, whole = self._cut(self.made_as[v]), self.whole.values[v].shape
        _, digits, stacked = cut.shapes(whole)
        local = cut.part(layout)
        apart, of_piece = cut.stacked(local), cut.digits(local)
        typing = OpTyping((), (local,), (of_piece,))
        pieces = [
            self._move(RESHAPE, (Ref(0), digits), [part], typing, [digits], v)[0]
            for part in self.of_part[v, self.made_as[v]]
        ]
        typing = OpTyping((), (of_piece,) * self.parts, (apart,))
        arguments = ((Ref(0),) * self.parts, self.made_as[v].dim + 1)
        (all_parts,) = self._move(STACK, arguments, pieces, typing, [stacked], v)
        typing = OpTyping((), (apart,), (layout,))
        return self._move(RESHAPE, (Ref(0), whole), [all_parts], typing, [whole], v)[0]

    # Writing.

    def _move(
        self,
        target: str,
        args: tuple[Arg, ...],
        operands: Sequence[int],
        typing: OpTyping,
        shapes: Sequence[Shape],
        v: int,
    ) -> tuple[int, ...]:
        """Write an op that splits or joins `v`."""
        op = Op(target, args, (), (v,) * len(shapes))
        return self._write(op, args, (), operands, typing, shapes)

    def _write(
        self,
        op: Op,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...],
        operands: Sequence[int],
        typing: OpTyping,
        shapes: Sequence[Shape],
    ) -> tuple[int, ...]:
        """Write `op` with other operands; the values that it makes, of these shapes."""
        refs = iter(operands)
        args = tuple(rebound(arg, refs) for arg in args)
        kwargs = tuple((name, rebound(arg, refs)) for name, arg in kwargs)
        first = len(self.values)
        self.values += [
            replace(self.whole.values[v], shape=shape)
            for v, shape in zip(op.outputs, shapes, strict=True)
        ]
        outputs = tuple(range(first, len(self.values)))
        self.ops.append(replace(op, args=args, kwargs=kwargs, outputs=outputs))
        self.typings.append(typing)
        return outputs

    def _with_rules(self, graph: OpGraph) -> Iterator[OpTyping]:
        """The typings with the names of their rules: blocks are part of a name."""
        table = region_rules(graph, self.sizes)
        for k, typing in enumerate(self.typings):
            names = (self._rule(graph, k, table[k], axis) for axis in range(len(self.sizes)))
            yield replace(typing, rules=tuple(names))

    def _rule(
        self, graph: OpGraph, k: int, per_axis: Sequence[Sequence[AxisRule]], axis: int
    ) -> str:
        """The name of the rule of op `k` on an axis. per_axis: those of the table."""
        typing = self.typings[k]
        types = (
            tuple(layout[axis] for layout in typing.inputs),
            tuple(layout[axis] for layout in typing.outputs),
        )
        before = typing.rules[axis] if typing.rules else ""
        found = [r.name for r in per_axis[axis] if (r.inputs, r.outputs) == types]
        if not (found or before):
            # Two axes cut one dim: the table has what either does alone.
            inside = rules_inside(graph, k, per_axis, self.sizes, axis).values()
            found = [r.name for r in inside if (r.inputs, r.outputs) == types]
        alike = [n for n in found if n.partition("/")[0] == before.partition("/")[0]]
        if not (found or before):
            raise UncutError(f"no rule of {graph.ops[k].target} splits it")
        return (alike or found or [before])[0]
