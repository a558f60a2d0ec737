"""Divisions next to a division: one layer moves from any stage to any other, the stages between
shift by one.

Judged by D of meshfold.cost_models.pipeline.makespan on the present bounds of the stages, all
neighbours at once; the search simulates the most promising ones.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshfold.passes.run.hull import FloatArray
from meshfold.passes.stages.bounds import DeviceBound, device_bound_s
from meshfold.passes.stages.tables import Table

BoundaryRows = NDArray[np.int64]


def neighbours(boundaries: Sequence[int]) -> BoundaryRows:
    """All divisions one layer away, shape (n, p + 1), stages of no layers left out."""
    at = np.asarray(boundaries)
    p = len(at) - 1
    giver, taker = np.nonzero(~np.eye(p, dtype=bool))
    position = np.arange(p + 1)
    low, high = np.minimum(giver, taker)[:, None], np.maximum(giver, taker)[:, None]
    between = (position > low) & (position <= high)
    moved = at + np.where(between, np.where(giver < taker, -1, 1)[:, None], 0)
    legal = np.all(np.diff(moved, axis=1) > 0, axis=1)
    return np.asarray(moved[legal])


def judge_s(
    boundaries: BoundaryRows,
    tables: Sequence[Table],
    device_bounds: Sequence[DeviceBound],
    share: float,
    hop_s: FloatArray,
) -> FloatArray:
    """D of each division, with `share` of every stage's time forward; infinite where nothing
    fits."""
    p = len(tables)
    width = tables[0].total_s.shape[1] - 1
    counts = np.diff(boundaries, axis=1)
    inside = np.minimum(counts, width)
    total = np.stack([t.objective_s[boundaries[:, i], inside[:, i]] for i, t in enumerate(tables)])
    fits = np.isfinite(total).all(axis=0) & (counts <= width).all(axis=1)
    total = np.where(fits, total, 0.0)
    hops = 2 * hop_s[boundaries.T]
    reached = np.cumsum(total + hops[:-1], axis=0)
    before = reached - total
    slowest = np.maximum.accumulate(np.vstack([np.zeros(len(boundaries)), total]), axis=0)
    worst = np.zeros(len(boundaries))
    for i in range(p):
        device_bound = replace(device_bounds[i], forward_low=share, forward_high=share)
        turns = [reached[j] - reached[i] for j, _ in device_bound.turns]
        bound = device_bound_s(device_bound, total[i], None, before[i], turns, slowest[i])
        worst = np.maximum(worst, bound)
    return np.where(fits, worst, np.inf)
