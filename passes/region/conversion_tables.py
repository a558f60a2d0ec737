"""Prices of conversions as matrices over layouts, for the region search.

A conversion changes the axes one by one, in the cheapest order whose intermediate layouts are all
legal (passes/price/conversions.py). The price of one step depends on the two types of its axis and
on how other axes shard the value at that moment: which of them do decides on its bytes, on which
dims on copies. So a full matrix

    M[s, t] = min over orders of the axes of  sum_k step_k(s_k -> t_k | others as converted so far)

is filled from few scalar prices (ConversionTables._seconds) by array indexing, one order at a time
(_Paths). Where no order is legal two shards are swapped, and one of them stops at Invariant
first. Seconds, forward plus backward; +inf where a role forbids the path.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshfold.ir.conversion_step import Step, exchange_is_even
from meshfold.ir.op_graph import Value
from meshfold.ir.spmd import INVARIANT, Layout, Shard, SpmdType
from meshfold.passes.price.conversions import (
    StepSeconds,
    has_conversion,
    inner_shards,
    step_seconds,
)
from meshfold.passes.region.elimination import Table
from meshfold.passes.region.roles import SearchCosts
from meshfold.passes.rules.joint import Legality

_ValueClass = tuple[tuple[int, ...], str, bool]
_Size = tuple[int, str, bool]
"""What the bytes of a step depend on of a value: its own, dtype, whether it needs a gradient."""
_StepKey = tuple[_Size, int, str, str, bool, bool, tuple[bool, ...]]
_Shards = tuple[SpmdType, ...]
_TableKey = tuple[_ValueClass, int, tuple[SpmdType, ...], tuple[_Shards, ...]]


class ConversionTables:
    """Conversion matrices on one mesh, as the roles of its axes have it. Everything computed is
    kept."""

    def __init__(self, costs: SearchCosts) -> None:
        self.mesh = costs.mesh
        self.costs = costs
        self.legal = Legality(costs.mesh.sizes)
        self._matrices: dict[tuple[_ValueClass, tuple[Layout, ...]], Table] = {}
        self._steps: dict[_StepKey, StepSeconds] = {}
        self._tables: dict[_TableKey, Table] = {}
        self._paths: dict[tuple[Layout, ...], _Paths] = {}

    def matrix(self, value: Value, layouts: tuple[Layout, ...]) -> Table:
        """M over `layouts` x `layouts` for a value of this shape and dtype. Do not write to it."""
        key = (value.shape, value.dtype, value.requires_grad), layouts
        found = self._matrices.get(key)
        if found is None:
            found = self._matrices[key] = self._fill(value, layouts)
        return found

    def _fill(self, value: Value, layouts: tuple[Layout, ...]) -> Table:
        best = self._direct(value, layouts)
        if len(self.mesh.axes) > 1:
            swaps = np.isinf(best) & _are_swaps(layouts)
            if swaps.any():
                self._detour(value, layouts, best, swaps)
        return best

    def _direct(self, value: Value, layouts: tuple[Layout, ...]) -> Table:
        """The cheapest order of one step per axis."""
        paths = self._paths.get(layouts)
        if paths is None:
            paths = self._paths[layouts] = _Paths(layouts)
        steps = [self._step_table(value, paths.types, k) for k in range(len(paths.types))]
        # A type by itself is legal, since a layout holds it: only two shards can conflict.
        legal = tuple([self.legal(value.shape, layout) for layout in paths.doubtful])
        return paths.cheapest(steps, legal)

    def _detour(
        self, value: Value, layouts: Sequence[Layout], best: Table, swaps: NDArray[np.bool_]
    ) -> None:
        """Price the pairs `swaps`, in which two shards are swapped on one dim: one first makes
        room as Invariant."""
        wider = list(dict.fromkeys((*layouts, *(s for x in layouts for s in _stops(x)))))
        matrix = self._direct(value, tuple(wider))
        number = {layout: k for k, layout in enumerate(wider)}
        for a in np.flatnonzero(swaps.any(axis=1)).tolist():
            targets = np.flatnonzero(swaps[a])
            paths = [
                matrix[a, number[stop]] + matrix[number[stop], targets]
                for stop in _stops(layouts[a])
            ]
            best[a, targets] = np.min(paths, axis=0)

    def _step_table(self, value: Value, types: Sequence[Sequence[SpmdType]], axis: int) -> Table:
        """[source type, target type, number of what other axes are (_states)] -> seconds. Do not
        write to it."""
        others = tuple(_shards(ts) if k != axis else () for k, ts in enumerate(types))
        key = (value.shape, value.dtype, value.requires_grad), axis, tuple(types[axis]), others
        found = self._tables.get(key)
        if found is None:
            found = self._tables[key] = self._fill_steps(value, key)
        return found

    def _fill_steps(self, value: Value, key: _TableKey) -> Table:
        _, axis, mine, others = key
        layouts = list(_states(others))
        shards = [tuple(t.is_shard for t in layout) for layout in layouts]
        number = {of: k for k, of in enumerate(dict.fromkeys(shards))}
        which = np.array([number[of] for of in shards], dtype=np.intp)
        inner = self._inner(value, axis, mine, layouts)
        table = np.zeros((len(mine), len(mine), len(layouts)))
        for (a, source), (b, target) in itertools.permutations(enumerate(mine), 2):
            extra_s = self.costs.extra_s(value, axis, source, target)
            if not has_conversion(source, target) or math.isinf(extra_s):
                table[a, b] = math.inf
                continue
            each = [self._seconds(value, axis, source, target, of) for of in number]
            moved_s, source_s, target_s = np.array(each).T[:, which]
            table[a, b] = extra_s + moved_s + source_s * inner[a] + target_s * inner[b]
        return table

    def _inner(
        self, value: Value, axis: int, mine: Sequence[SpmdType], layouts: Sequence[Layout]
    ) -> NDArray[np.bool_]:
        """[type of `axis`, layout of the others] -> whether its shards are of an inner dim."""
        sizes, shape = self.mesh.sizes, value.shape
        found = np.zeros((len(mine), len(layouts)), dtype=bool)
        for k, shard in enumerate(mine):
            if shard.is_shard:
                found[k] = [inner_shards(shape, x, axis, shard, sizes) for x in layouts]
        return found

    def _seconds(
        self,
        value: Value,
        axis: int,
        source: SpmdType,
        target: SpmdType,
        others: tuple[bool, ...],
    ) -> tuple[float, float, float]:
        """Of one step while the axes of `others` shard the value, too (StepSeconds): on which dims
        does not matter, nor on which one the step shards unless a shard moves."""
        moves = source.is_shard and target.is_shard
        is_even = not moves or exchange_is_even(source, target, self.mesh.sizes[axis])
        size = value.num_bytes, value.dtype, value.requires_grad
        key = size, axis, source.kind, target.kind, is_even, target.padded, others
        found = self._steps.get(key)
        if found is None:
            layout = tuple(Shard(0) if is_shard else INVARIANT for is_shard in others)
            before = (*layout[:axis], source, *layout[axis + 1 :])
            step = Step(axis, source, target, before)
            found = self._steps[key] = step_seconds(value, step, self.costs)
        return found.moved_s, found.source_copies_s, found.target_copies_s


def _shards(types: Sequence[SpmdType]) -> _Shards:
    """The different shards among types."""
    return tuple(dict.fromkeys(t for t in types if t.is_shard))


def _states(shards: Sequence[_Shards]) -> Iterator[Layout]:
    """What axes that shard like this, or do not, may be together, in the order of their numbers."""
    return itertools.product(*((INVARIANT, *of_axis) for of_axis in shards))


def _are_swaps(layouts: Sequence[Layout]) -> NDArray[np.bool_]:
    """[source, target] -> whether two axes or more go from shard to another shard."""
    moves = np.zeros((len(layouts), len(layouts)), dtype=np.intp)
    for of_axis in zip(*layouts, strict=True):
        number = {t: k for k, t in enumerate(dict.fromkeys(t for t in of_axis if t.is_shard))}
        shards = np.array([number.get(t, -1) for t in of_axis])
        is_shard = shards >= 0
        both = is_shard[:, None] & is_shard[None, :]
        moves += both & (shards[:, None] != shards[None, :])
    return moves > 1


def _stops(layout: Layout) -> list[Layout]:
    """The layout with one of its shards Invariant instead; rows stay with their experts."""
    shards = (k for k, t in enumerate(layout) if t.kind == "S")
    return [(*layout[:k], INVARIANT, *layout[k + 1 :]) for k in shards]


class _Paths:
    """All paths from layout to layout with one step per axis, whatever the value. types: per axis
    those that there are; doubtful: layouts on the way that not every tensor can have."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        axes = range(len(layouts[0]))
        self.types = [sorted({layout[k] for layout in layouts}) for k in axes]
        indices = [{t: i for i, t in enumerate(of_axis)} for of_axis in self.types]
        self._numbers = np.array(
            [[indices[k][layout[k]] for k in axes] for layout in layouts], dtype=np.intp
        ).reshape(len(layouts), len(axes))
        """[layout, axis] -> type."""
        self._combinations = list(itertools.product(*(range(len(t)) for t in self.types)))
        between = [tuple(self.types[k][i] for k, i in enumerate(at)) for at in self._combinations]
        self._doubts = [
            n for n, layout in enumerate(between) if sum(t.is_shard for t in layout) > 1
        ]
        self.doubtful = [between[n] for n in self._doubts]
        self._orders: dict[tuple[bool, ...], list[_Order]] = {}

    def cheapest(self, steps: Sequence[Table], legal: tuple[bool, ...]) -> Table:
        """The matrix of a value. steps: per axis [source, target, number of what other axes are] ->
        seconds; legal: per doubtful layout."""
        if legal not in self._orders:
            self._orders[legal] = self._legal_orders(legal)
        flat = [table.ravel() for table in steps]
        best: Table | None = None
        for order in self._orders[legal]:
            total = order.barred
            for axis, entries in order.entries:
                total = total + flat[axis][entries]
            best = total if best is None else np.minimum(best, total)
        assert best is not None
        if len(steps) > 1:
            np.fill_diagonal(best, 0.0)
        return best

    def _legal_orders(self, legal: tuple[bool, ...]) -> "list[_Order]":
        table = np.ones([len(t) for t in self.types], dtype=bool)
        for n, is_legal in zip(self._doubts, legal, strict=True):
            table[self._combinations[n]] = is_legal
        orders = itertools.permutations(range(len(self.types)))
        return [self._in_order(order, table) for order in orders]

    def _in_order(self, order: Sequence[int], legal: NDArray[np.bool_]) -> "_Order":
        """The axes converted in this order."""
        numbers, axes = self._numbers, range(len(self.types))
        count = len(numbers)
        shards = [_shards(ts) for ts in self.types]
        # Of what is no shard: it is like Invariant for the others.
        states = [
            np.array([1 + s.index(t) if t.is_shard else 0 for t in ts], dtype=np.intp)
            for s, ts in zip(shards, self.types, strict=True)
        ]
        now = [np.broadcast_to(numbers[:, k, None], (count, count)) for k in axes]
        barred = np.zeros((count, count))
        entries = []
        for axis in order:
            state, num_states = np.zeros((count, count), dtype=np.intp), 1
            for k in axes:
                if k != axis:
                    state = state * (1 + len(shards[k])) + states[k][now[k]]
                    num_states *= 1 + len(shards[k])
            target = np.broadcast_to(numbers[None, :, axis], (count, count))
            size = len(self.types[axis])
            entries.append((axis, (now[axis] * size + target) * num_states + state))
            now[axis] = target
            barred = np.where(legal[tuple(now)], barred, np.inf)
        return _Order(entries, barred)


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    """One order of the axes: per step its axis and, from layout to layout, the entry of that
    axis's table; barred: +inf where a layout on the path is not legal, else 0."""

    entries: list[tuple[int, NDArray[np.intp]]]
    barred: Table
