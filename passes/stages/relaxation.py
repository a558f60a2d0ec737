"""Lower bounds on the time of every possible stage at once.

A stage is the layers [a, a + c) with k microbatches in flight under M bytes. At any price x >= 0 of
a byte, with phi_l(x) = min over strategies s of layer l of  t_s + x (state_s + k act_s), where act
includes what is put off to W,

    T[a, c] = max_x  sum_{a <= l < a+c} phi_l(x) - x (M - k resident[a])                 (relaxed_s)

bounds the stage's time from below (Lagrange), and is the value of the linear relaxation once x runs
through the slopes of the layer types' hulls (run/hull.py). With prefix sums over the chain that is
one table operation for all a and c. Where transients differ, a stage's largest one is at most some
threshold: the bound is the least over thresholds, each with the strategies and memory it leaves.
"""

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from meshfold.passes.run.hull import FloatArray, IntArray, lower_hull
from meshfold.passes.stages.problem import LayerCosts, Moments, StageProblem

MAX_PRICES = 48
"""Prices tried per table; more of them only tighten the bound."""

MAX_THRESHOLDS = 6
"""Groups of transients told apart; more of them only tighten the bound."""


def relaxed_s(
    problem: StageProblem,
    objectives_s: Sequence[FloatArray],
    moments: Moments,
    budget_bytes: int,
    width: int,
    max_thresholds: int = MAX_THRESHOLDS,
) -> FloatArray:
    """T of the module docstring, shape (L + 1, width + 1): row a, column c layers.

    objectives_s: per run, seconds of each strategy. moments: every layer keeps the least of these.
    max_thresholds: groups of transients.
    Infinite where even the least memory does not
    fit, beyond the end of the chain, and in column 0.
    """
    layers = [run.layer for run in problem.runs]
    best = np.full((problem.num_layers + 1, width + 1), np.inf)
    for threshold, least in transient_groups(layers, max_thresholds):
        allowed = [layer.transient_bytes <= threshold for layer in layers]
        memory = [np.min([x.bytes_with(n) for n in moments], axis=0) for x in layers]
        room = budget_bytes - least - min(n for n, *_ in moments) * problem.resident_bytes
        np.minimum(best, _bounds_s(problem, objectives_s, memory, allowed, room, width), out=best)
    best[:, 0] = np.inf
    return best


def transient_groups(
    layers: Sequence[LayerCosts], most: int = MAX_THRESHOLDS
) -> list[tuple[int, int]]:
    """(largest, least) transient of groups of like transients, together covering all."""
    values = np.unique(np.concatenate([layer.transient_bytes for layer in layers]))
    groups = np.array_split(values, min(len(values), most))
    return [(int(group[-1]), int(group[0])) for group in groups]


def _bounds_s(
    problem: StageProblem,
    objectives_s: Sequence[FloatArray],
    memory: Sequence[IntArray],
    allowed: Sequence[NDArray[np.bool_]],
    room: IntArray,
    width: int,
) -> FloatArray:
    """T over the allowed strategies, with `room` bytes for a stage by its first layer."""
    counts = [run.count for run in problem.runs]
    usable = np.array([bool(mask.any()) for mask in allowed])
    tables = [
        (s[mask], m[mask]) if ok else (np.zeros(1), np.zeros(1, np.int64))
        for s, m, mask, ok in zip(objectives_s, memory, allowed, usable, strict=True)
    ]
    prices = _prices(tables)
    value = np.array([(s + np.outer(prices, m)).min(axis=1) for s, m in tables])
    prefix = _prefix_sums(np.repeat(value, counts, axis=0).T)
    rows, row_of = _different_rows(problem, room, width)
    room = room[rows]
    sums = _windows(prefix, rows, width) - (prices[:, None] * room)[:, :, None]
    best = sums.max(axis=0)
    least = _prefix_sums(np.repeat([[m.min() for _, m in tables]], counts, axis=1))
    missing = _prefix_sums(np.repeat([(~usable).astype(float)], counts, axis=1))
    for values, limit in ((least, room), (missing, np.zeros_like(room))):
        best[_windows(values, rows, width)[0] > limit[:, None]] = np.inf
    return np.asarray(np.maximum(best, 0.0)[row_of])


def _different_rows(problem: StageProblem, room: IntArray, width: int) -> tuple[IntArray, IntArray]:
    """The first layers whose stages differ, and by first layer which of these it is like: deep in a
    run of equal layers stages of up to `width` are the same wherever they begin."""
    like = np.arange(problem.num_layers + 1)
    for start, stop in zip(problem.starts, problem.starts[1:], strict=False):
        inside = np.arange(start, stop - width + 1)
        if len(inside) > 1:
            _, first, which = np.unique(room[inside], return_index=True, return_inverse=True)
            like[inside] = inside[first][which]
    rows, row_of = np.unique(like, return_inverse=True)
    return rows, row_of


def _windows(prefix: FloatArray, rows: IntArray, width: int) -> FloatArray:
    """Sums over up to `width` layers from each of `rows` on; infinite beyond the end of the
    chain. prefix: sums before each layer, shape (n, L + 1); the result's: (n, rows, width + 1)."""
    padded = np.full((len(prefix), prefix.shape[1] + width), np.inf)
    padded[:, : prefix.shape[1]] = prefix
    of_rows = sliding_window_view(padded, width + 1, axis=1)[:, rows]
    return np.asarray(of_rows - of_rows[:, :, :1])


def _prices(tables: Sequence[tuple[FloatArray, IntArray]]) -> FloatArray:
    """0 and the slopes of the hulls of all types, thinned evenly where there are many."""
    slopes = [np.zeros(1)]
    for seconds, memory in tables:
        hull = lower_hull(seconds, memory)
        slopes.append(-np.diff(hull.time_s) / np.diff(hull.memory_bytes))
    prices = np.unique(np.concatenate(slopes))
    if len(prices) > MAX_PRICES:
        prices = prices[np.linspace(0, len(prices) - 1, MAX_PRICES).round().astype(int)]
    return prices


def _prefix_sums(per_layer: FloatArray) -> FloatArray:
    """(rows, L) -> (rows, L + 1), sums over the layers before each position."""
    sums = np.zeros((len(per_layer), per_layer.shape[1] + 1))
    np.cumsum(per_layer, axis=1, out=sums[:, 1:])
    return sums
