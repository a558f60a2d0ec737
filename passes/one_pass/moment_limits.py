"""Layers whose bytes are limited at several moments: when the backward starts, when it ends, and
while the optimizer steps.

The exact search of a chain knows one sum of bytes, that of the start. What it finds may be too
large later, when activations are gone and gradients are whole: recomputation helps the start alone,
shards and states on the host help all three. Then layers are given candidates anew under all
limits: how many layers of each group take which. The linear relaxation leaves no more layers
between candidates than there are limits, and these take the best of all candidates that there is
room for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from meshfold.passes.run.hull import FloatArray, IntArray

MOST_FREE = 3
"""Layers that may take any candidate, at most: all combinations are looked at."""

MOST_COMBINATIONS = 1_000_000
"""Of candidates of these layers, at most."""

MOST_CHANGES = 60
"""Changes of one layer of which up to three are made at once, those first that gain most by the
prices of the relaxation."""

MOST_EXCHANGES = 20
"""How often layers change. Three times are usual."""

LEAST_GAIN = 1e-9
"""Share of the time that a change must gain."""

WHOLE = 1e-6
"""Counts nearer than this to a whole number are that number."""


@dataclass(frozen=True, eq=False)
class LayerChoices:
    """`count` layers that take the same candidates. time_s: seconds by candidate; needs: bytes of a
    layer by moment (row) and candidate (column)."""

    count: int
    time_s: FloatArray
    needs: IntArray

    def undominated(self) -> IntArray:
        """Candidates that no other beats or equals in everything; of equal ones the first."""
        costs = np.vstack([self.time_s, self.needs])
        beats = (costs[:, :, None] <= costs[:, None, :]).all(axis=0)
        earlier = np.arange(len(self.time_s))[:, None] < np.arange(len(self.time_s))[None, :]
        return np.flatnonzero(~(beats & (~beats.T | earlier)).any(axis=0))


class _Table:
    """The undominated candidates of all groups side by side. rows: of each group; owners: the group
    of each column."""

    def __init__(self, groups: Sequence[LayerChoices]) -> None:
        self.rows = [group.undominated() for group in groups]
        both = list(zip(groups, self.rows, strict=True))
        self.owners = np.repeat(np.arange(len(groups)), [len(rows) for rows in self.rows])
        self.time_s = np.concatenate([group.time_s[rows] for group, rows in both])
        self.needs = np.hstack([group.needs[:, rows] for group, rows in both])
        self.layers = np.array([group.count for group in groups])

    def relaxed(self, limits: IntArray) -> tuple[FloatArray, FloatArray] | None:
        """(Layers per column in the linear relaxation, seconds per byte of each limit); None where
        nothing fits."""
        is_of = self.owners == np.arange(len(self.rows))[:, None]
        found = linprog(
            self.time_s,
            A_ub=self.needs / limits[:, None],
            b_ub=np.ones(len(limits)),
            A_eq=is_of.astype(float),
            b_eq=self.layers.astype(float),
            method="highs-ds",
        )
        if found.x is None:
            return None
        return found.x, np.maximum(0.0, -found.ineqlin.marginals) / limits


def least_s(groups: Sequence[LayerChoices], limits: Sequence[int]) -> float:
    """No counts that keep all limits take less. By duality, with the prices of the relaxation: a
    bound under any prices, however the solver rounded. 0 where it finds that nothing fits."""
    table, room = _Table(groups), np.array(limits)
    relaxed = table.relaxed(room) if np.all(room > 0) else None
    if relaxed is None:
        return 0.0
    _, prices = relaxed
    worth_s = table.time_s + prices @ table.needs
    best_s = np.minimum.reduceat(worth_s, np.flatnonzero(np.diff(table.owners, prepend=-1)))
    return float(table.layers @ best_s - prices @ room)


def counts_within(groups: Sequence[LayerChoices], limits: Sequence[int]) -> list[IntArray] | None:
    """Layers per candidate of every group that keep all limits (what is fixed is taken off
    already), in little time: no more above the relaxation than whole layers make it. None where
    none are found."""
    table, room = _Table(groups), np.array(limits)
    relaxed = table.relaxed(room) if np.all(room > 0) else None
    if relaxed is None:
        return None
    layers, prices = relaxed
    counts = np.floor(layers + WHOLE).astype(np.int64)
    taken = np.flatnonzero(counts)
    for fewer in (None, *taken[np.argsort(-counts[taken], kind="stable")]):
        # Where no combination fits, one layer more is free.
        left = counts.copy()
        left[[] if fewer is None else fewer] -= 1
        if _place(table, room, left):
            return _by_group(groups, table, _exchanged(table, room, left, prices))
    return None


def _by_group(groups: Sequence[LayerChoices], table: _Table, counts: IntArray) -> list[IntArray]:
    out = [np.zeros(len(group.time_s), np.int64) for group in groups]
    for g, rows in enumerate(table.rows):
        out[g][rows] = counts[table.owners == g]
    return out


def _exchanged(table: _Table, limits: IntArray, counts: IntArray, prices: FloatArray) -> IntArray:
    """`counts` while up to three layers that change their candidates at once make the program
    faster within the limits. prices: seconds per byte of each moment in the relaxation."""
    owners, time_s, needs = table.owners, table.time_s, table.needs
    worth_s = time_s + prices @ needs
    for _ in range(MOST_EXCHANGES):
        alike = (owners[:, None] == owners[None, :]) & ~np.eye(len(owners), dtype=bool)
        source, target = np.nonzero((counts > 0)[:, None] & alike)
        best = np.argsort(worth_s[target] - worth_s[source], kind="stable")[:MOST_CHANGES]
        changes = _Changes(source[best], target[best], time_s, needs, counts)
        found = changes.best(limits - needs @ counts, LEAST_GAIN * abs(float(time_s @ counts)))
        if not found:
            break
        counts = changes.made(found, counts)
    return counts


class _Changes:
    """Changes of one layer's candidate, or of all layers' that have it; and at last none."""

    def __init__(
        self,
        source: IntArray,
        target: IntArray,
        time_s: FloatArray,
        needs: IntArray,
        counts: IntArray,
    ) -> None:
        several = counts[source] > 1
        self.source, self.target = (np.append(x, [*x[several], -1]) for x in (source, target))
        layers = np.append(np.ones_like(source), [*counts[source][several], 0])
        self.layers = layers
        self.time_s = layers * (time_s[self.target] - time_s[self.source])
        self.needs = layers * (needs[:, self.target] - needs[:, self.source])
        self._left = np.append(counts[self.source[:-1]], len(counts))

    def best(self, room: IntArray, least_s: float) -> list[int]:
        """The numbers of up to three that together gain most time in the room; none where that is
        least_s or less."""
        a, b = np.nonzero(np.triu(self.time_s[:, None] + self.time_s[None, :] < 0))
        # Of any three that gain, two do.
        is_there = (self.source[a] != self.source[b]) | (
            self.layers[a] + self.layers[b] <= self._left[a]
        )
        a, b = a[is_there], b[is_there]
        total_s = (self.time_s[a] + self.time_s[b])[:, None] + self.time_s[None, :]
        fits = total_s < -least_s
        for of_moment, left in zip(self.needs, room, strict=True):
            fits &= (of_moment[a] + of_moment[b])[:, None] + of_moment[None, :] <= left
        taken = self.layers[None, :] + sum(
            self.layers[of][:, None] * (self.source[of][:, None] == self.source[None, :])
            for of in (a, b)
        )
        fits &= taken <= self._left[None, :]
        if not fits.any():
            return []
        p, c = np.unravel_index(np.argmin(np.where(fits, total_s, np.inf)), fits.shape)
        return [int(a[p]), int(b[p]), int(c)]

    def made(self, numbers: Sequence[int], counts: IntArray) -> IntArray:
        """`counts` after these changes."""
        made = counts.copy()
        for k in numbers:
            made[self.source[k]] -= self.layers[k]
            made[self.target[k]] += self.layers[k]
        return made


def _place(table: _Table, limits: IntArray, counts: IntArray) -> bool:
    """Gives the layers of each group that `counts` has none of yet the candidates that take least
    time within the limits, and counts them. False where no combination fits."""
    time_s, needs = table.time_s, table.needs
    of_group = [np.flatnonzero(table.owners == g) for g in range(len(table.rows))]
    options = [
        of
        for of, layers in zip(of_group, table.layers, strict=True)
        for _ in range(layers - counts[of].sum())
    ]
    shape = [len(of) for of in options]
    if len(options) > MOST_FREE or np.prod(shape) > MOST_COMBINATIONS:
        return False
    grids = np.meshgrid(*options, indexing="ij")
    room = limits - needs @ counts
    total_s = sum((time_s[grid] for grid in grids), np.zeros(shape))
    fits = np.ones(shape, bool)
    for of_moment, left in zip(needs, room, strict=True):
        fits &= sum((of_moment[grid] for grid in grids), np.zeros(shape, np.int64)) <= left
    if not fits.any():
        return False
    best = np.argmin(np.where(fits, total_s, np.inf))
    for grid in grids:
        counts[grid.ravel()[best]] += 1
    return True
