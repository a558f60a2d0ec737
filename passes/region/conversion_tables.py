"""Prices of conversions as matrices over layouts, for the region search.

A conversion changes the axes one by one, in the cheapest order whose intermediate layouts are all
legal (passes/price/conversions.py). The price of one step depends on the two types of its axis and
on which other axes shard the value at that moment, so a full matrix

    M[s, t] = min over orders of the axes of  sum_k step_k(s_k -> t_k | others as converted so far)

is filled from few scalar prices (ConversionTables._step_s) by array indexing, one order at a time
(_Paths). Where no order is legal two shards are swapped, and one of them stops at Invariant
first. Seconds, forward plus backward; +inf where a role forbids the path.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshfold.ir.conversion_step import Step, exchange_is_even
from meshfold.ir.op_graph import Value
from meshfold.ir.spmd import INVARIANT, Layout, Shard, SpmdType
from meshfold.passes.price.conversions import has_conversion, step_s
from meshfold.passes.region.elimination import Table
from meshfold.passes.region.roles import SearchCosts
from meshfold.passes.rules.joint import Legality

_ValueClass = tuple[tuple[int, ...], str, bool]
_Size = tuple[int, str, bool]
"""What the price of a step depends on of a value: bytes, dtype, whether it needs a gradient."""
_StepKey = tuple[_Size, int, str, str, bool, bool, tuple[bool, ...]]
_TableKey = tuple[_Size, int, tuple[SpmdType, ...], tuple[frozenset[bool], ...]]


class ConversionTables:
    """Conversion matrices on one mesh, as the roles of its axes have it. Everything computed is
    kept."""

    def __init__(self, costs: SearchCosts) -> None:
        self.mesh = costs.mesh
        self.costs = costs
        self.legal = Legality(costs.mesh.sizes)
        self._matrices: dict[tuple[_ValueClass, tuple[Layout, ...]], Table] = {}
        self._steps: dict[_StepKey, float] = {}
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
        """[source type, target type, which other axes shard the value (bits)] -> seconds. Do not
        write to it."""
        others = tuple(
            frozenset(t.is_shard for t in of_axis) if k != axis else frozenset({False})
            for k, of_axis in enumerate(types)
        )
        size = value.num_bytes, value.dtype, value.requires_grad
        key = size, axis, tuple(types[axis]), others
        found = self._tables.get(key)
        if found is None:
            found = self._tables[key] = self._fill_steps(value, key)
        return found

    def _fill_steps(self, value: Value, key: _TableKey) -> Table:
        _, axis, mine, others = key
        table = np.zeros((len(mine), len(mine), 2 ** len(others)))
        combinations = [
            (sum(is_shard << k for k, is_shard in enumerate(shards)), shards)
            for shards in itertools.product(*others)
        ]
        for (a, source), (b, target) in itertools.permutations(enumerate(mine), 2):
            extra_s = self.costs.extra_s(value, axis, source, target)
            extra_s = extra_s if has_conversion(source, target) else math.inf
            for bits, shards in combinations:
                table[a, b, bits] = extra_s
                if not math.isinf(extra_s):
                    table[a, b, bits] += self._step_s(key[0], value, axis, source, target, shards)
        return table

    def _step_s(
        self,
        size: _Size,
        value: Value,
        axis: int,
        source: SpmdType,
        target: SpmdType,
        others: tuple[bool, ...],
    ) -> float:
        """One step while the axes of `others` shard the value, too: on which dims does not matter
        to the price, nor on which one the step shards unless a shard moves."""
        moves = source.is_shard and target.is_shard
        is_even = not moves or exchange_is_even(source, target, self.mesh.sizes[axis])
        key = size, axis, source.kind, target.kind, is_even, target.padded, others
        found = self._steps.get(key)
        if found is None:
            layout = tuple(Shard(0) if is_shard else INVARIANT for is_shard in others)
            before = (*layout[:axis], source, *layout[axis + 1 :])
            step = Step(axis, source, target, before)
            found = self._steps[key] = step_s(value, step, self.costs)
        return found


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
        """The matrix of a value. steps: per axis [source, target, which other axes shard it] ->
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
        shards = [np.array([t.is_shard for t in ts], dtype=np.intp) for ts in self.types]
        now = [np.broadcast_to(numbers[:, k, None], (count, count)) for k in axes]
        barred = np.zeros((count, count))
        entries = []
        for axis in order:
            bits = sum(
                (shards[k][now[k]] << k for k in axes if k != axis),
                start=np.zeros((count, count), dtype=np.intp),
            )
            target = np.broadcast_to(numbers[None, :, axis], (count, count))
            size = len(self.types[axis])
            entries.append((axis, ((now[axis] * size + target) << len(axes)) + bits))
            now[axis] = target
            barred = np.where(legal[tuple(now)], barred, np.inf)
        return _Order(entries, barred)


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    """One order of the axes: per step its axis and, from layout to layout, the entry of that
    axis's table; barred: +inf where a layout on the path is not legal, else 0."""

    entries: list[tuple[int, NDArray[np.intp]]]
    barred: Table
