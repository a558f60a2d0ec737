"""Cuts next to a cut: one layer moves from any stage to any other, the stages between shift by one.

Judged by D of meshfold.cost_models.pipeline.makespan on the present bounds of the stages, all neighbours at
once; the search simulates the most promising ones.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshfold.passes.run.hull import FloatArray
from meshfold.passes.stages.bounds import Terms, device_bound_s
from meshfold.passes.stages.tables import Table

Cuts = NDArray[np.int64]


def neighbours(cuts: Sequence[int]) -> Cuts:
    """All cuts one layer away, shape (n, p + 1), stages of no layers left out."""
    at = np.asarray(cuts)
    p = len(at) - 1
    giver, taker = np.nonzero(~np.eye(p, dtype=bool))
    position = np.arange(p + 1)
    low, high = np.minimum(giver, taker)[:, None], np.maximum(giver, taker)[:, None]
    between = (position > low) & (position <= high)
    moved = at + np.where(between, np.where(giver < taker, -1, 1)[:, None], 0)
    legal = np.all(np.diff(moved, axis=1) > 0, axis=1)
    return np.asarray(moved[legal])


def judge_s(
    cuts: Cuts, tables: Sequence[Table], terms: Sequence[Terms], share: float, hop_s: FloatArray
) -> FloatArray:
    """D of each cut, with `share` of every stage's time forward; infinite where nothing fits."""
    p = len(tables)
    width = tables[0].total_s.shape[1] - 1
    counts = np.diff(cuts, axis=1)
    inside = np.minimum(counts, width)
    total = np.stack([t.objective_s[cuts[:, i], inside[:, i]] for i, t in enumerate(tables)])
    fits = np.isfinite(total).all(axis=0) & (counts <= width).all(axis=1)
    total = np.where(fits, total, 0.0)
    hops = 2 * hop_s[cuts.T]
    way = np.cumsum(total + hops[:-1], axis=0)
    before = way - total
    slowest = np.maximum.accumulate(np.vstack([np.zeros(len(cuts)), total]), axis=0)
    worst = np.zeros(len(cuts))
    for i in range(p):
        term = replace(terms[i], forward_low=share, forward_high=share)
        ways = [way[j] - way[i] for j, _ in term.turns]
        bound = device_bound_s(term, total[i], None, before[i], ways, slowest[i])
        worst = np.maximum(worst, bound)
    return np.where(fits, worst, np.inf)
