"""Lower bound on the makespan of all divisions of a chain into stages; a division that meets it.

Notation of meshfold.cost_models.pipeline.makespan; T_i[a, b] bounds the time of stage i with the
layers [a, b) from below (relaxation.py, or stages solved exactly). The makespan is at least pre_i +
m t_i + the time stage i waits, for every i. What forces it to wait (DeviceBound.own_s), with U_ij
the time of a microbatch from its F on stage i to stage j and back, X the slowest stage before i,
low t <= F <= high t:

    turn    F_i(w_j), then down to j and up again: B_i(0) waits U_ij - (w_i - w_j) F_i; the last
            backward likewise, with B_i. D of the pipeline module is j = p-1; under a deeper warm-up
            the stage where the depths bend (the knee) says more
    supply  F_i(w_i) waits for w_i forwards of the slowest stage before it, w_i (F_X - F_i); the end
            for its backwards, w_i (B_X - B_i)
    cycle   F_i(n + w_i - w_j + 1) comes after F_i(n) has gone to j and back, t_i + U_ij each
            time: what transfers cost that no warm-up hides

All of them grow with t, U and X, so lower bounds may stand in for these:

    pre[i][a] = least sum of t (and transfers) of i stages that end before layer a
    slow[i][a] = least maximum of their t
    suf_j[i][b] = least sum of the stages i..j from layer b on
    best[i+1][b] = min_a max(best[i][a], device_bound(i, a, b));   bound = best[p][L]
                                                                                                 (tighten)

A possible stage (arc) no plan faster than the incumbent can contain has a bottleneck through it at
or above the incumbent; it is dropped, which raises pre, suf and so the bound, until nothing changes
much. O(arcs) per sweep.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshfold.cost_models.pipeline.schedules import Schedule, ScheduleKind
from meshfold.passes.run.hull import FloatArray
from meshfold.passes.stages.problem import StageProblem

Indices = NDArray[np.intp]

MAX_SWEEPS = 4


@dataclass(frozen=True, slots=True)
class DeviceBound:
    """What the bound needs to know of a device besides its times."""

    num_microbatches: int
    warm_up: int | None
    """Forwards w. None: it waits for the turn in full, as under gpipe."""

    turns: tuple[tuple[int, int], ...]
    """The stages j its microbatches are followed to, as (j, w_j)."""

    forward_low: float
    """Least share of F in t."""

    forward_high: float
    """Largest share of F in t."""

    weight_high: float
    """Largest share of W in t where the backward is split."""

    num_deferred: int
    """Weight gradients that run after the last backward."""

    def own_s(
        self, total_s: FloatArray, turns_s: Sequence[FloatArray], slowest_s: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """(seconds until the device ends, seconds until its last backward ends), from its first
        forward on; total_s = t, turns_s = U to each turn, slowest_s = X, broadcast together."""
        m = self.num_microbatches
        if self.warm_up is None:
            until = m * total_s + turns_s[0]
            return until, until
        # No share of an infinite total is a number.
        is_endless = np.isinf(total_s)
        total_s = np.where(is_endless, 0.0, total_s)
        scale = 1 - self.weight_high
        waits = np.maximum(self._supply_s(total_s, scale * slowest_s), 0.0)
        cycle_s: FloatArray = np.zeros(1)
        for (_, depth), turn_s in zip(self.turns, turns_s, strict=True):
            turn_s = scale * turn_s
            waits = np.maximum(waits, self._turn_s(total_s, turn_s, slowest_s * scale, depth))
            lap, rest = divmod(m - 1 - depth, self.warm_up - depth + 1)
            if lap >= 1:
                steps_s = (rest + depth) * scale * total_s
                cycle_s = np.maximum(cycle_s, (lap + 1) * (scale * total_s + turn_s) + steps_s)
        until = np.maximum(m * total_s + waits, cycle_s)
        until = np.where(is_endless, np.inf, until)
        return until, until - min(m, self.num_deferred) * self.weight_high * total_s

    def _supply_s(self, total_s: FloatArray, slowest_s: FloatArray) -> FloatArray:
        assert self.warm_up is not None
        warm = min(self.warm_up, self.num_microbatches - 1)
        if self.num_microbatches - 1 > self.warm_up:
            return warm * (slowest_s - total_s)
        low, high = self.forward_low, self.forward_high
        ahead = np.maximum(low * slowest_s - high * total_s, (slowest_s - total_s) / 2)
        return warm * np.maximum(ahead, (1 - high) * slowest_s - (1 - low) * total_s)

    def _turn_s(
        self, total_s: FloatArray, turn_s: FloatArray, slowest_s: FloatArray, depth: int
    ) -> FloatArray:
        assert self.warm_up is not None
        last = self.num_microbatches - 1
        warm = min(self.warm_up, last) - min(depth, last)
        waits = turn_s - warm * min(self.forward_high, 1 - self.forward_low) * total_s
        if last <= self.warm_up:
            return waits
        waits = np.maximum(waits, 2 * turn_s - warm * total_s)
        if depth:
            return waits
        share = max(self.forward_low, 1 - self.forward_high)
        return np.maximum(waits, turn_s + warm * (share * slowest_s - total_s))


def device_bounds_of(problem: StageProblem, schedule: Schedule) -> tuple[DeviceBound, ...]:
    """What bounds every device, with shares over all strategies of the chain."""
    costs = [run.layer for run in problem.runs]
    forward = np.concatenate([c.forward_s for c in costs])
    weight = np.concatenate([c.weight_s for c in costs])
    total = np.concatenate([c.total_s for c in costs])
    busy = total > 0
    shares = forward[busy] / total[busy] if busy.any() else np.array([0.5])
    heaviest = 0.0
    if schedule.splits_backward and busy.any():
        heaviest = float((weight[busy] / total[busy]).max())
    warm, last = schedule.warm_up, schedule.num_devices - 1
    knee = last - schedule.extra_warm_up
    return tuple(
        DeviceBound(
            schedule.num_microbatches,
            None if schedule.kind is ScheduleKind.GPIPE else warm[i],
            ((last, warm[last]), (knee, warm[knee])) if i < knee < last else ((last, warm[last]),),
            float(shares.min()),
            float(shares.max()),
            heaviest,
            delay + 1 if schedule.splits_backward else 0,
        )
        for i, delay in enumerate(schedule.weight_delay)
    )


def bounds_of_any(problem: StageProblem, schedules: Sequence[Schedule]) -> tuple[DeviceBound, ...]:
    """What bounds every device under each of the schedules: its own work, after the forwards of the
    stages before it, and before their backwards."""
    found = []
    for of_device in zip(*(device_bounds_of(problem, s) for s in schedules), strict=True):
        first = of_device[0]
        found.append(
            DeviceBound(
                first.num_microbatches,
                0,
                (),
                first.forward_low,
                first.forward_high,
                max(x.weight_high for x in of_device),
                max(x.num_deferred for x in of_device),
            )
        )
    return tuple(found)


@dataclass(frozen=True, eq=False)
class Arcs:
    """The stages a device may get: layers [start, end), at least total_s per microbatch without
    sync_s and objective_s with its share of it (None: no layer has any). One entry per arc."""

    start: Indices
    end: Indices
    total_s: FloatArray
    objective_s: FloatArray | None

    def where(self, mask: NDArray[np.bool_]) -> "Arcs":
        """The arcs where the mask is set."""
        shared = None if self.objective_s is None else self.objective_s[mask]
        return Arcs(self.start[mask], self.end[mask], self.total_s[mask], shared)


@dataclass(frozen=True, eq=False)
class Bound:
    """bound_s: no division along the arcs is faster. boundaries: first layer of each stage and L at
    the end, of a division whose every device_bound is at most bound_s; None when the arcs hold
    none. arcs: those left."""

    bound_s: float
    boundaries: tuple[int, ...] | None
    arcs: tuple[Arcs, ...]


def tighten(
    device_bounds: Sequence[DeviceBound], arcs: Sequence[Arcs], hop_s: FloatArray, limit_s: float
) -> Bound:
    """The bound of the module docstring; only divisions faster than limit_s are of interest.

    hop_s: by boundary, shape (L + 1,). With nothing faster than limit_s left the bound is limit_s.
    """
    left = tuple(arcs)
    bound_s, boundaries = 0.0, None
    for _ in range(MAX_SWEEPS):
        through, best = _bottlenecks(device_bounds, left, _least_sums(device_bounds, left, hop_s))
        if not np.isfinite(best[-1][-1]):
            return Bound(limit_s, None, left)
        bound_s = max(bound_s, float(best[-1][-1]))
        boundaries = _boundaries(left, through, best)
        masks = [values < limit_s for values in through]
        dropped = sum(int((~mask).sum()) for mask in masks)
        left = tuple(of_i.where(mask) for of_i, mask in zip(left, masks, strict=True))
        if bound_s >= limit_s:
            return Bound(limit_s, None, left)
        if dropped <= sum(len(of_i.start) for of_i in left) // 20:
            break
    return Bound(bound_s, boundaries, left)


@dataclass(frozen=True, eq=False)
class _Least:
    """Sums over all divisions along the arcs: pre and slow of the module docstring, and suf by its
    j. The transfer over the boundary at their layer is included."""

    before: list[FloatArray]
    slowest: list[FloatArray]
    after: dict[int, list[FloatArray]]


def _least_sums(
    device_bounds: Sequence[DeviceBound], arcs: Sequence[Arcs], hop_s: FloatArray
) -> _Least:
    size, p = len(hop_s), len(arcs)
    before = [np.full(size, np.inf) for _ in range(p + 1)]
    slowest = [np.full(size, np.inf) for _ in range(p + 1)]
    before[0][0] = slowest[0][0] = 0.0
    for i, of_i in enumerate(arcs):
        np.minimum.at(before[i + 1], of_i.end, before[i][of_i.start] + of_i.total_s)
        np.minimum.at(slowest[i + 1], of_i.end, np.maximum(slowest[i][of_i.start], of_i.total_s))
        before[i + 1] += 2 * hop_s
    after = {}
    for j in sorted({p - 1, *(j for bound in device_bounds for j, _ in bound.turns)}):
        sums = [np.full(size, np.inf) for _ in range(j + 1)]
        sums.append(np.zeros(size))
        for i in reversed(range(j + 1)):
            of_i = arcs[i]
            np.minimum.at(sums[i], of_i.start, of_i.total_s + sums[i + 1][of_i.end])
            sums[i] += 2 * hop_s
        after[j] = sums
    return _Least(before, slowest, after)


def _bottlenecks(
    device_bounds: Sequence[DeviceBound], arcs: Sequence[Arcs], least: _Least
) -> tuple[list[FloatArray], list[FloatArray]]:
    """The least bottleneck of a division through each arc of every device, and best[i][a]."""
    size, p = len(least.before[0]), len(arcs)
    rest_s = least.after[p - 1]
    own = []
    for i, (device_bound, of_i) in enumerate(zip(device_bounds, arcs, strict=True)):
        joined = np.isfinite(least.before[i][of_i.start]) & np.isfinite(rest_s[i + 1][of_i.end])
        turns_s = [
            np.where(joined, least.after[j][i + 1][of_i.end], 0.0) for j, _ in device_bound.turns
        ]
        before_s, slowest_s = (
            np.where(joined, sums[i][of_i.start], 0.0) for sums in (least.before, least.slowest)
        )
        bound_s = device_bound_s(
            device_bound, of_i.total_s, of_i.objective_s, before_s, turns_s, slowest_s
        )
        own.append(np.where(joined, bound_s, np.inf))
    best = [np.full(size, np.inf) for _ in range(p + 1)]
    rest = [np.full(size, np.inf) for _ in range(p + 1)]
    best[0][0] = rest[-1][-1] = 0.0
    for i, of_i in enumerate(arcs):
        np.minimum.at(best[i + 1], of_i.end, np.maximum(best[i][of_i.start], own[i]))
    through = [np.zeros(0)] * p
    for i in reversed(range(p)):
        of_i = arcs[i]
        onward = np.maximum(own[i], rest[i + 1][of_i.end])
        np.minimum.at(rest[i], of_i.start, onward)
        through[i] = np.maximum(best[i][of_i.start], onward)
    return through, best


def device_bound_s(
    device_bound: DeviceBound,
    total_s: FloatArray,
    objective_s: FloatArray | None,
    before_s: FloatArray,
    turns_s: Sequence[FloatArray],
    slowest_s: FloatArray,
) -> FloatArray:
    """The bound of one device with stages of total_s: the later of its own end with sync_s, and its
    last backward with the transfers back. before_s: pre with the transfers; the rest as
    DeviceBound.own_s."""
    _, until_last = device_bound.own_s(total_s, turns_s, slowest_s)
    found = until_last + (1 - device_bound.weight_high) * before_s
    if device_bound.weight_high or objective_s is not None:
        shared_s = total_s if objective_s is None else objective_s
        until_end, _ = device_bound.own_s(shared_s, turns_s, slowest_s)
        # Downwards only: forwards, and each transfer once instead of twice.
        found = np.maximum(found, until_end + min(device_bound.forward_low, 0.5) * before_s)
    return found


def _boundaries(
    arcs: Sequence[Arcs], through: Sequence[FloatArray], best: Sequence[FloatArray]
) -> tuple[int, ...]:
    """A division of least bottleneck, read back from the last device; ties go to the longer
    stage."""
    end = len(best[0]) - 1
    boundaries = [end]
    for i in reversed(range(len(arcs))):
        of_i = arcs[i]
        into = np.flatnonzero(of_i.end == end)
        at = into[int(np.argmin(through[i][into]))]
        end = int(of_i.start[at])
        boundaries.append(end)
    return tuple(reversed(boundaries))


def split(arcs: Sequence[Arcs]) -> list[tuple[Arcs, ...]]:
    """The divisions along the arcs in two sets: those whose widest open boundary lies in the lower
    half of where it may lie, and the rest. Nothing where no boundary is open."""
    ranges = [(int(np.ptp(of_i.start)), i) for i, of_i in enumerate(arcs) if len(of_i.start)]
    widest, device = max(ranges, default=(0, 0))
    if len(ranges) < len(arcs) or widest == 0:
        return []
    middle = int(arcs[device].start.min()) + widest // 2
    halves = []
    for low in (True, False):
        sides = list(arcs)
        sides[device] = sides[device].where((arcs[device].start <= middle) == low)
        sides[device - 1] = sides[device - 1].where((arcs[device - 1].end <= middle) == low)
        halves.append(tuple(sides))
    return halves
