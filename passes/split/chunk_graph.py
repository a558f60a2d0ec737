"""The graph of a region in micro-chunks, written from its graph and two typings.

    x -> unflatten, unbind -> x0, x1      ops that see the dim that is split run once per chunk
    y <- reshape, stack    <- y0, y1      ops that do not, or need all of it, once

The dim is [blocks, ranks, chunks, rest]: ranks shard the second of these, so splitting and joining
move no data between ranks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshfold.ir.op_graph import Arg, Op, OpGraph, Ref, SlotKind
from meshfold.ir.spmd import Layout, SpmdType, local_shape
from meshfold.ir.strategy import KeptResults, OpTyping, RegionTyping
from meshfold.passes.graph.typed import layouts_of_values
from meshfold.passes.rules.localize import localize
from meshfold.passes.rules.ops.random import with_own_draw
from meshfold.passes.rules.table import AxisRule, region_rules, rules_inside

UNFLATTEN, UNBIND = "aten.unflatten.int", "aten.unbind.int"
RESHAPE, STACK = "aten.reshape.default", "aten.stack.default"

SPLITS = (UNFLATTEN, UNBIND, RESHAPE, STACK)
"""What splits and joins is written as."""

Shape = tuple[int, ...]


class ChunkingError(Exception):
    """A region cannot run in micro-chunks."""


def chunked_graph(
    graph: OpGraph,
    typing: RegionTyping,
    time: RegionTyping,
    count: int,
    chunks: int,
    sizes: tuple[int, ...],
) -> tuple[OpGraph, RegionTyping]:
    """A region in `chunks` micro-chunks: its graph and typing; slots and outputs are the region's.

    typing: on a mesh of `sizes`; time: on the time axis; count: samples or rows that it splits.
    Raises ChunkingError where it does not divide, or no rule does so.
    """
    return _ChunkWriter(graph, typing, time, count, chunks, sizes).written()


@dataclass(frozen=True)
class _Split:
    """How the dim of a value that has the batch, or the sequence, is split: [blocks, ranks, chunks,
    rest], in this order. type: the shard of the time axis; count: samples, or rows of the sequence;
    sizes: of the mesh."""

    type: SpmdType
    ranks: int
    chunks: int
    count: int
    sizes: tuple[int, ...]

    @property
    def above(self) -> int:
        """Blocks of the dim in which the chunks lie."""
        return self.type.blocks * self.ranks

    def chunk(self, layout: Layout) -> Layout:
        """`layout` of a value for one chunk of it."""
        return tuple(self._of_chunk(t, n) for t, n in zip(layout, self.sizes, strict=True))

    def _of_chunk(self, t: SpmdType, size: int) -> SpmdType:
        if not (t.is_shard and t.dim == self.type.dim):
            return t
        if t.padded:
            raise ChunkingError("the dim that is split is padded")
        if t.blocks >= self.type.blocks * self.count:
            return replace(t, blocks=t.blocks // self.chunks)
        if t.blocks * size > self.above:
            raise ChunkingError("ranks shard it otherwise")
        return t

    def digits(self, layout: Layout) -> Layout:
        """`layout` of one chunk where the dim is two: [blocks * ranks, rest]."""
        return self._moved(layout, 1)

    def stacked(self, layout: Layout) -> Layout:
        """`layout` of one chunk for all joined, whose dim is [blocks * ranks, chunks, rest]."""
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

    def shapes(self, unsplit: Shape) -> tuple[Shape, Shape, Shape]:
        """Shapes of one chunk, of one with the dim as [blocks * ranks, rest], and of all joined.
        Raises ChunkingError where the dim does not divide."""
        dim = self.type.dim
        before, after = unsplit[:dim], unsplit[dim + 1 :]
        rest, left = divmod(unsplit[dim], self.above * self.chunks)
        if left:  # the leading digit of what is split: rows of a map, of its pixels
            raise ChunkingError(
                f"a dim of {unsplit[dim]} does not divide into {self.chunks} micro-chunks on "
                f"{self.ranks} ranks"
            )
        return (
            (*before, self.above * rest, *after),
            (*before, self.above, rest, *after),
            (*before, self.above, self.chunks, rest, *after),
        )


class _ChunkWriter:
    """Writes the graph of a region in micro-chunks, see chunked_graph."""

    def __init__(
        self,
        graph: OpGraph,
        typing: RegionTyping,
        time: RegionTyping,
        count: int,
        chunks: int,
        sizes: tuple[int, ...],
    ) -> None:
        self.unsplit = graph
        self.typing = typing
        self.time = time
        self.count = count
        self.chunks = chunks
        self.sizes = sizes
        self.native = [layout for layout, _ in layouts_of_values(graph, typing)]
        self.time_types = [layout[0] for layout, _ in layouts_of_values(graph, time)]
        """Type of every value on the time axis."""
        self.ranks = self._ranks()
        if count % (self.ranks * chunks):
            raise ChunkingError(
                f"{count} do not divide into {chunks} micro-chunks on {self.ranks} ranks"
            )
        num_slots = len(graph.slots)
        self.values = list(graph.values[:num_slots])
        self.ops: list[Op] = []
        self.typings: list[OpTyping] = []
        self.origins: list[int] = []
        """Of every op the one that it stands for, -1 where it splits or joins."""
        self.at: dict[int, int] = {v: v for v in range(num_slots)}
        """What stands for a joined value, where it is joined."""
        self.of_chunk: dict[tuple[int, SpmdType], tuple[int, ...]] = {}

    def written(self) -> tuple[OpGraph, RegionTyping]:
        """The finished graph; slots and outputs are those of the region."""
        for k, (op, chosen) in enumerate(zip(self.unsplit.ops, self.time.ops, strict=True)):
            if any(layout[0].is_shard for layout in chosen.outputs):
                self._run_in_chunks(k, op)
            else:
                operands = [self._together(v) for v in op.operands]
                shapes = [self.unsplit.values[v].shape for v in op.outputs]
                op = with_own_draw(op, k)
                typing = self.typing.ops[k]
                computed = self._write(op, op.args, op.kwargs, operands, typing, shapes, k)
                self.at.update(zip(op.outputs, computed, strict=True))
        pairs = zip(self.unsplit.outputs, self.typing.outputs, strict=True)
        outputs = tuple(
            self.at[v] if v in self.at else self._joined(v, layout) for v, layout in pairs
        )
        graph = OpGraph(self.unsplit.slots, tuple(self.values), tuple(self.ops), outputs)
        return graph, replace(self.typing, ops=tuple(self._with_rules(graph)), kept=self._kept())

    def _kept(self) -> KeptResults:
        """What the region keeps, chunk by chunk."""
        kept, conversions = self.typing.kept, []
        for v, layout in kept.conversions:
            if v in self.at:
                conversions.append((self.at[v], layout))
            time = self.time_types[v]
            chunks = self.of_chunk.get((v, time), ())
            conversions += [(chunk, self._chunk_layout(time, layout)) for chunk in chunks]
        ops = tuple(n for n, k in enumerate(self.origins) if k in kept.ops)
        return KeptResults(ops, tuple(conversions))

    def _ranks(self) -> int:
        """The most ranks that dim is sharded over."""
        sizes, count = self.sizes, self.count
        axes = {
            axis
            for layout, split in zip(self.native, self.time_types, strict=True)
            for axis, t in enumerate(layout)
            if split.is_shard and t.is_shard and t.dim == split.dim
            if split.blocks <= t.blocks and t.blocks * sizes[axis] <= split.blocks * count
        }
        return math.prod(sizes[axis] for axis in axes)

    def _split_of(self, time: SpmdType) -> _Split:
        return _Split(time, self.ranks, self.chunks, self.count, self.sizes)

    def _chunk_layout(self, time: SpmdType, layout: Layout) -> Layout:
        return self._split_of(time).chunk(layout) if time.is_shard else layout

    def _run_in_chunks(self, k: int, op: Op) -> None:
        """An op that sees what is split, once per chunk."""
        typing, chosen = self.typing.ops[k], self.time.ops[k]
        args, kwargs = localize(self.unsplit, k, chosen, (self.chunks,))
        reads = [(v, layout[0]) for v, layout in zip(op.operands, chosen.inputs, strict=True)]
        of_chunk = OpTyping(
            typing.rules,
            tuple(map(self._chunk_layout, (time for _, time in reads), typing.inputs)),
            tuple(map(self._chunk_layout, (x[0] for x in chosen.outputs), typing.outputs)),
        )
        shapes = [
            local_shape(self.unsplit.values[v].shape, layout, (self.chunks,))
            for v, layout in zip(op.outputs, chosen.outputs, strict=True)
        ]
        computed = []
        for number in range(self.chunks):
            operands = [
                self._split(v, time)[number] if time.is_shard else self._together(v)
                for v, time in reads
            ]
            computed.append(self._write(op, args, kwargs, operands, of_chunk, shapes, k))
        for v, *of_chunks in zip(op.outputs, *computed, strict=True):
            if self.time_types[v].is_shard:
                self.of_chunk[v, self.time_types[v]] = tuple(of_chunks)
            else:
                self.at[v] = of_chunks[0]

    def _split(self, v: int, time: SpmdType) -> tuple[int, ...]:
        """The chunks of `v`; of one that is not computed in chunks, split as `time` says."""
        if (v, time) in self.of_chunk:
            return self.of_chunk[v, time]
        if v < len(self.unsplit.slots) and self.unsplit.slots[v].kind is SlotKind.PARAMETER:
            raise ChunkingError("a parameter would be split")
        split, layout, dim = self._split_of(time), self.native[v], time.dim
        shape, digits, stacked = split.shapes(self.unsplit.values[v].shape)
        local = split.chunk(layout)
        apart, of_digits = split.stacked(local), split.digits(local)
        arguments = (Ref(0), dim, stacked[dim : dim + 3])
        typing = OpTyping((), (layout,), (apart,))
        (unsplit,) = self._move(UNFLATTEN, arguments, [self.at[v]], typing, [stacked], v)
        typing = OpTyping((), (apart,), (of_digits,) * self.chunks)
        shapes = [digits] * self.chunks
        chunks = self._move(UNBIND, (Ref(0), dim + 1), [unsplit], typing, shapes, v)
        typing = OpTyping((), (of_digits,), (local,))
        self.of_chunk[v, time] = tuple(
            self._move(RESHAPE, (Ref(0), shape), [chunk], typing, [shape], v)[0] for chunk in chunks
        )
        return self.of_chunk[v, time]

    def _together(self, v: int) -> int:
        """`v` joined, in the layout in which it is computed."""
        if v not in self.at:
            self.at[v] = self._joined(v, self.native[v])
        return self.at[v]

    def _joined(self, v: int, layout: Layout) -> int:
        """All chunks of an output, in the layout in which it leaves."""
        split, unsplit = self._split_of(self.time_types[v]), self.unsplit.values[v].shape
        _, digits, stacked = split.shapes(unsplit)
        local = split.chunk(layout)
        apart, of_digits = split.stacked(local), split.digits(local)
        typing = OpTyping((), (local,), (of_digits,))
        chunks = [
            self._move(RESHAPE, (Ref(0), digits), [chunk], typing, [digits], v)[0]
            for chunk in self.of_chunk[v, self.time_types[v]]
        ]
        typing = OpTyping((), (of_digits,) * self.chunks, (apart,))
        arguments = ((Ref(0),) * self.chunks, self.time_types[v].dim + 1)
        (joined,) = self._move(STACK, arguments, chunks, typing, [stacked], v)
        typing = OpTyping((), (apart,), (layout,))
        return self._move(RESHAPE, (Ref(0), unsplit), [joined], typing, [unsplit], v)[0]

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
        origin: int = -1,
    ) -> tuple[int, ...]:
        """Write `op` with other operands; its results, of these shapes. origin: see origins."""
        first = len(self.values)
        self.values += [
            replace(self.unsplit.values[v], shape=shape)
            for v, shape in zip(op.outputs, shapes, strict=True)
        ]
        outputs = tuple(range(first, len(self.values)))
        self.ops.append(replace(op, args=args, kwargs=kwargs).on_values(operands, outputs))
        self.typings.append(typing)
        self.origins.append(origin)
        return outputs

    def _with_rules(self, graph: OpGraph) -> Iterator[OpTyping]:
        """The typings with the names of their rules: names have blocks."""
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
            # Two axes shard one dim: the table has what either does alone.
            inside = rules_inside(graph, k, per_axis, self.sizes, axis).values()
            found = [r.name for r in inside if (r.inputs, r.outputs) == types]
        alike = [n for n in found if n.partition("/")[0] == before.partition("/")[0]]
        if not (found or before):
            raise ChunkingError(f"no rule of {graph.ops[k].target} splits it")
        return (alike or found or [before])[0]
