"""A chain's program when two moments are short of memory: the backward, and the optimizer's step.

The exact search of a chain knows one sum of bytes, that of the backward. What it finds may be too
large while the optimizer steps, when activations are gone and gradients are whole: recomputation
helps the one moment alone, shards and states on the host help both. Then layers are given
candidates anew under both sums: how many layers of each group take which. The linear relaxation
leaves at most two layers between candidates, and these take the best of all candidates that both
budgets have room for. The order of the boundary layouts stays as found.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from meshfold.passes.run.hull import FloatArray, IntArray

MOST_FREE = 3
"""Layers that may take any candidate, at most: all combinations are looked at. The relaxation
leaves two."""

WHOLE = 1e-6
"""Counts nearer than this to a whole number are that number."""


@dataclass(frozen=True, eq=False)
class LayerChoices:
    """`count` layers that take the same candidates. One entry per candidate: seconds, and bytes
    of a layer in the backward and while the optimizer steps."""

    count: int
    time_s: FloatArray
    backward_bytes: IntArray
    step_bytes: IntArray

    def undominated(self) -> IntArray:
        """Candidates that no other beats or equals in all three; of equal ones the first."""
        costs = np.stack([self.time_s, self.backward_bytes, self.step_bytes])
        beats = (costs[:, :, None] <= costs[:, None, :]).all(axis=0)
        earlier = np.arange(len(self.time_s))[:, None] < np.arange(len(self.time_s))[None, :]
        return np.flatnonzero(~(beats & (~beats.T | earlier)).any(axis=0))


def counts_within(
    groups: Sequence[LayerChoices], backward_bytes: int, step_bytes: int
) -> list[IntArray] | None:
    """Layers per candidate of every group, in little time under both budgets (what is fixed is
    taken off already): no more above the relaxation than whole layers make it. None where none is
    found."""
    kept = [group.undominated() for group in groups]
    owners = np.repeat(np.arange(len(groups)), [len(rows) for rows in kept])
    rows = np.concatenate(kept)
    of = [(groups[g], k) for g, k in zip(owners, rows, strict=True)]
    time_s = np.array([group.time_s[k] for group, k in of])
    needs = np.array([(g.backward_bytes[k], g.step_bytes[k]) for g, k in of], np.int64).T
    layers = np.array([group.count for group in groups])
    budgets = np.array([backward_bytes, step_bytes])
    if np.any(budgets <= 0):
        return None
    relaxed = linprog(
        time_s,
        A_ub=needs / budgets[:, None],
        b_ub=np.ones(2),
        A_eq=(owners == np.arange(len(groups))[:, None]).astype(float),
        b_eq=layers.astype(float),
        method="highs-ds",
    )
    if relaxed.x is None:
        return None
    counts = np.floor(relaxed.x + WHOLE).astype(np.int64)
    taken = np.flatnonzero(counts)
    for fewer in (None, *taken[np.argsort(-counts[taken], kind="stable")]):
        # Where no combination fits, one layer more is free.
        left = counts.copy()
        left[[] if fewer is None else fewer] -= 1
        if _place(layers, owners, time_s, needs, budgets, left):
            return _by_group(groups, owners, rows, left)
    return None


def _by_group(
    groups: Sequence[LayerChoices], owners: IntArray, rows: IntArray, counts: IntArray
) -> list[IntArray]:
    out = [np.zeros(len(group.time_s), np.int64) for group in groups]
    for g, k, count in zip(owners, rows, counts, strict=True):
        out[g][k] = count
    return out


def _place(
    layers: IntArray,
    owners: IntArray,
    time_s: FloatArray,
    needs: IntArray,
    budgets: IntArray,
    counts: IntArray,
) -> bool:
    """Gives the layers of each group that `counts` has none of yet the candidates that take least
    time within the budgets, and counts them. False where no combination fits."""
    free = np.repeat(
        np.arange(len(layers)), [n - counts[owners == g].sum() for g, n in enumerate(layers)]
    )
    if len(free) > MOST_FREE:
        return False
    room = budgets - needs @ counts
    options = [np.flatnonzero(owners == g) for g in free]
    grids = np.meshgrid(*options, indexing="ij")
    total_s = sum((time_s[grid] for grid in grids), np.zeros([len(o) for o in options]))
    fits = np.ones(total_s.shape, bool)
    for of_moment, left in zip(needs, room, strict=True):
        fits &= sum((of_moment[grid] for grid in grids), np.zeros(fits.shape, np.int64)) <= left
    if not fits.any():
        return False
    best = np.argmin(np.where(fits, total_s, np.inf))
    for grid in grids:
        counts[grid.ravel()[best]] += 1
    return True
