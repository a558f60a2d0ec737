"""The linear relaxation of the run level: a lower bound for every memory budget at once.

Stands below the run search (passes/run/search.py) and the stage search. The problem: every layer of
a type takes one strategy of the type's table; minimise the sum of times subject to the sum of
memory <= M.

Relaxed to fractional counts, only the counts of strategies matter, and the optimum is

    LP(M) = min sum_i n_i * h_i(x_i)   over   sum_i n_i * x_i <= M

with h_i the lower convex hull of the points (memory, time) of type i and n_i its number of layers
(`lower_hull`). A sum of hulls is a hull, too: its edges are those of the summands, each n_i times
as long, in order of slope (`sum_hulls`, the relaxation of the multiple-choice knapsack; Sinha and
Zoltners 1979). Reading it at many budgets is one interpolation (`Hull.time_at_s`). The slope at M,
sign changed, is the price of memory (seconds per byte) that the exact search prunes with.

No plan with these layers and M bytes is faster than LP(M), conversions between layouts included:
they only add to it. Sorting dominates the cost: O(S log S) for S strategies, for any n_i.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Hull:
    """A convex, decreasing, piecewise linear time as a function of memory.

    memory_bytes: float64, strictly increasing, one entry per vertex; time_s: strictly decreasing.
    strategies: for each vertex the index into the table the hull was taken from; -1 in sums.
    """

    memory_bytes: FloatArray
    time_s: FloatArray
    strategies: IntArray

    @cached_property
    def edges(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Bytes (> 0), seconds (< 0) and slope of every edge, slopes in increasing order:
        rounding may turn two nearly equal ones round, edges must stay in order."""
        edges_bytes, edges_s = np.diff(self.memory_bytes), np.diff(self.time_s)
        return edges_bytes, edges_s, np.maximum.accumulate(edges_s / edges_bytes)

    def time_at_s(self, budgets_bytes: ArrayLike, num_layers: ArrayLike = 1) -> FloatArray:
        """Least relaxed seconds of `num_layers` layers at each budget, broadcast together.

        Infinite below the least memory; for zero layers 0 at budgets >= 0.
        """
        budgets, layers = np.broadcast_arrays(
            np.asarray(budgets_bytes, float), np.asarray(num_layers, float)
        )
        share = budgets / np.maximum(layers, 1)
        per_layer_s = np.interp(share, self.memory_bytes, self.time_s, left=np.inf)
        empty_s = np.where(budgets >= 0, 0.0, np.inf)
        return np.asarray(np.multiply(layers, per_layer_s, where=layers > 0, out=empty_s))

    def price_at(self, budget_bytes: float) -> float:
        """Seconds that one more byte saves at a budget; 0 when memory does not bind."""
        vertex = int(np.searchsorted(self.memory_bytes, budget_bytes, side="right"))
        if not 0 < vertex < len(self.memory_bytes):
            return 0.0
        saved_s = self.time_s[vertex - 1] - self.time_s[vertex]
        return float(saved_s / (self.memory_bytes[vertex] - self.memory_bytes[vertex - 1]))


def undominated(time_s: FloatArray, memory_bytes: IntArray) -> IntArray:
    """Indices of the strategies no other beats in both time and memory, by increasing memory.

    Of equal strategies the first is retained, so callers put their preferred order into the arrays.
    """
    order = np.lexsort((time_s, memory_bytes))
    sorted_s = time_s[order]
    best_before_s = np.minimum.accumulate(np.concatenate(([np.inf], sorted_s[:-1])))
    return np.asarray(order[sorted_s < best_before_s], dtype=np.int64)


def lower_hull(time_s: ArrayLike, memory_bytes: ArrayLike) -> Hull:
    """Lower convex hull of one type's strategies, from least memory to least time.

    time_s: seconds per layer, finite; memory_bytes: whole bytes per layer below 2^53; one entry
    per strategy, at least one (ValueError otherwise).
    """
    times, memory = np.asarray(time_s, float), np.asarray(memory_bytes, np.int64)
    if times.ndim != 1 or times.shape != memory.shape or not times.size:
        raise ValueError("a hull needs one time and one memory for each of at least one strategy")
    corners: list[int] = []
    for index in undominated(times, memory).tolist():
        while len(corners) > 1 and not _is_convex(times, memory, corners[-2], corners[-1], index):
            corners.pop()
        corners.append(index)
    return Hull(memory[corners].astype(float), times[corners], np.asarray(corners, np.int64))


def _is_convex(times: FloatArray, memory: IntArray, left: int, middle: int, right: int) -> bool:
    """Whether the middle point lies strictly below the line through the outer two."""
    to_middle = (times[middle] - times[left]) * float(memory[right] - memory[left])
    to_right = (times[right] - times[left]) * float(memory[middle] - memory[left])
    return bool(to_middle < to_right)


def sum_hulls(hulls: Sequence[Hull], counts: Sequence[int]) -> Hull:
    """The hull of `counts[i]` layers of each type i together; types with no layers are skipped."""
    owners, edges_bytes, edges_s = steepest_edges(hulls)
    lengths = np.asarray(counts, float)[owners]
    used = lengths > 0
    steps_bytes, steps_s = (lengths * edges_bytes)[used], (lengths * edges_s)[used]
    least_bytes = sum(n * hull.memory_bytes[0] for hull, n in zip(hulls, counts, strict=True))
    most_s = sum(n * hull.time_s[0] for hull, n in zip(hulls, counts, strict=True))
    memory = np.concatenate(([least_bytes], least_bytes + np.cumsum(steps_bytes)))
    times = np.concatenate(([most_s], most_s + np.cumsum(steps_s)))
    return Hull(memory, times, np.full(len(memory), -1))


def steepest_edges(hulls: Sequence[Hull]) -> tuple[IntArray, FloatArray, FloatArray]:
    """All edges of all hulls, the one that saves most time per byte first; equal ones by type.

    Returns for each edge the index of its hull, its bytes (> 0) and its seconds (< 0) of one layer.
    """
    edges = [hull.edges for hull in hulls]
    owners = np.repeat(np.arange(len(hulls)), [len(of_hull) for of_hull, _, _ in edges])
    edges_bytes = np.concatenate([of_hull for of_hull, _, _ in edges])
    edges_s = np.concatenate([of_hull for _, of_hull, _ in edges])
    ordered = np.concatenate([slopes for _, _, slopes in edges])
    order = np.argsort(ordered, kind="stable")
    return owners[order], edges_bytes[order], edges_s[order]


@dataclass(frozen=True)
class RelaxedPoint:
    """Where the relaxed optimum of several types lies.

    vertices: a vertex of each hull. between: the one type whose layers are split between its vertex
    and the next, -1 when none is; moved_layers: how many of them (a fraction) are at the next.
    price: of memory there, in seconds per byte; 0 when memory does not bind.
    """

    vertices: tuple[int, ...]
    between: int
    moved_layers: float
    price: float


def relaxed_point(hulls: Sequence[Hull], counts: Sequence[int], budget_bytes: int) -> RelaxedPoint:
    """The relaxed optimum of `counts[i]` >= 1 layers of each type i; the least memory must fit."""
    vertices = [0] * len(hulls)
    least_bytes = sum(n * hull.memory_bytes[0] for hull, n in zip(hulls, counts, strict=True))
    free = budget_bytes - float(least_bytes)
    owners, edges_bytes, edges_s = steepest_edges(hulls)
    for owner, edge_bytes, edge_s in zip(
        owners.tolist(), edges_bytes.tolist(), edges_s.tolist(), strict=True
    ):
        if counts[owner] * edge_bytes > free:
            return RelaxedPoint(tuple(vertices), owner, free / edge_bytes, -edge_s / edge_bytes)
        free -= counts[owner] * edge_bytes
        vertices[owner] += 1
    return RelaxedPoint(tuple(vertices), -1, 0.0, 0.0)


def lp_values(
    types: Sequence[tuple[ArrayLike, ArrayLike, int]], budgets_bytes: ArrayLike
) -> FloatArray:
    """Lower bounds on the time of a run at many budgets.

    types: (time_s per strategy, memory_bytes per strategy, number of layers) for each layer type.
    budgets_bytes: any shape, all fixed bytes already subtracted. Returns seconds in that shape,
    infinite where not even the least memory fits.
    """
    hulls = [lower_hull(time_s, memory_bytes) for time_s, memory_bytes, _ in types]
    return sum_hulls(hulls, [count for _, _, count in types]).time_at_s(budgets_bytes)
