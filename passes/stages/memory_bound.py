"""A lower bound on the step of a chain under its memory, before any division into stages.

Layers are fluid: any fraction of a layer may be on any device under any strategy. With n_k layers
of type k, x[i, k, s] of them on device i under strategy s, T and M their seconds per microbatch and
bytes with as many microbatches in flight as device i has at least, the step is at least

    min z   over   m sum_ks (T + sync / m) x[i, k, s] <= z            every device i is busy
                   bubble_factor * sum_iks T x[i, k, s] <= z          the pipeline fills and drains
                   sum_ks M x[i, k, s] <= memory_i - least transient
                   sum_is x[i, k, s] = n_k

Devices with like numbers in flight are one group with the least of them, which only lowers z. The
solver's answer is not taken at its word: the bound is the dual objective of its prices, evaluated
here (every vector of prices gives a bound).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from meshfold.cost_models.pipeline.bubble_bounds import bubble_factor, split_bubble_factor
from meshfold.cost_models.pipeline.schedules import (
    Schedule,
    ScheduleKind,
    counted_in_flight,
)
from meshfold.passes.run.hull import FloatArray, IntArray
from meshfold.passes.stages.problem import InFlight, LayerCosts, StageProblem

MAX_GROUPS = 8
"""Groups of devices with like numbers of microbatches in flight; more only tighten the bound."""

INFEASIBLE = 2
"""linprog's status."""


def memory_bound_s(problem: StageProblem, kinds: Collection[ScheduleKind]) -> float:
    """No plan under schedules of `kinds`, one stage per device, is faster; infinite where the least
    memory of all layers does not fit, 0 for kinds of which nothing is known."""
    families = list(_families(problem, kinds))
    if not families or any(k not in _KNOWN for k in kinds):
        return 0.0
    return min(fluid_step_s(problem, *family) for family in families)


_KNOWN = (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE)


def _families(
    problem: StageProblem, kinds: Collection[ScheduleKind]
) -> Iterator[tuple[IntArray, float]]:
    """(microbatches in flight at least, by device, as of fluid_step_s; factor of the sum of all
    stages)."""
    p, m = problem.num_devices, problem.num_microbatches
    if ScheduleKind.GPIPE in kinds or ScheduleKind.ONE_F_ONE_B in kinds:
        yield np.minimum(m, np.arange(p, 0, -1))[:, None], bubble_factor(p, m, p - 1)
    if ScheduleKind.ZERO_BUBBLE in kinds:
        shares = [
            float((layer.forward_s[busy] / layer.total_s[busy]).min())
            for layer in (run.layer for run in problem.runs)
            if (busy := layer.total_s > 0).any()
        ]
        factor = max(m / p, split_bubble_factor(p, m, min(shares, default=0.0)))
        of_devices = counted_in_flight(Schedule(ScheduleKind.ZERO_BUBBLE, p, m))
        yield np.array([moments[-1] for moments in of_devices]), factor


@dataclass(frozen=True, eq=False)
class _Columns:
    """The variables x, one entry each: the group of devices, the type, seconds, bytes."""

    group: IntArray
    layer: IntArray
    busy_s: FloatArray
    total_s: FloatArray
    memory_bytes: FloatArray


def fluid_step_s(problem: StageProblem, in_flight: IntArray, factor: float) -> float:
    """z of the module docstring. in_flight: by device, before the end of B and, in a second column,
    between B and W. factor: of the sum of all stages."""
    counts: dict[LayerCosts, int] = {}
    for run in problem.runs:
        counts[run.layer] = counts.get(run.layer, 0) + run.count
    sizes, room = _groups(problem, in_flight)
    if (room <= 0).any():
        return float("inf")
    flights = [tuple(in_flight[members].min(axis=0).tolist()) for members in _members(in_flight)]
    columns = _columns(problem, list(counts), flights)
    numbers = np.array(list(counts.values()), float)
    scale = problem.num_microbatches * float(columns.busy_s.max(initial=0.0)) * numbers.sum()
    if scale == 0.0:
        return 0.0
    # Rows: every group is busy, every group's memory, the bubble; scaled to numbers around 1.
    in_group = columns.group == np.arange(len(sizes))[:, None]
    busy = problem.num_microbatches / scale * in_group * columns.busy_s
    memory = in_group * columns.memory_bytes / room[:, None]
    bubble = factor / scale * columns.total_s
    left = np.vstack([busy, memory, bubble[None]])
    of_z = np.concatenate([-sizes, np.zeros(len(sizes)), [-1.0]])
    limits = np.concatenate([np.zeros(len(sizes)), np.ones(len(sizes)), [0.0]])
    return float(scale * least_z(left, of_z, limits, columns.layer, numbers))


def least_z(
    left: FloatArray, of_z: FloatArray, limits: FloatArray, layer: IntArray, numbers: FloatArray
) -> float:
    """A lower bound on z where left x + of_z z <= limits and x >= 0 adds up to numbers[k] over the
    variables whose layer is k; infinite where there is no such x. It is the dual objective of the
    solver's prices, not its answer."""
    is_type = (layer == np.arange(len(numbers))[:, None]).astype(float)
    answer = linprog(
        np.append(np.zeros(len(layer)), 1.0),
        A_ub=np.column_stack([left, of_z]),
        b_ub=limits,
        A_eq=np.column_stack([is_type, np.zeros(len(numbers))]),
        b_eq=numbers,
        method="highs",
    )
    if answer.status == INFEASIBLE:
        return float("inf")
    if answer.x is None:
        return 0.0
    prices = np.maximum(0.0, -answer.ineqlin.marginals)
    return _dual(prices, left, of_z, limits, layer, numbers)


def _dual(
    prices: FloatArray,
    left: FloatArray,
    of_z: FloatArray,
    limits: FloatArray,
    layer: IntArray,
    numbers: FloatArray,
) -> float:
    """The dual objective at any prices >= 0, after they are scaled to what z is worth: layers at
    their cheapest, less what the memory is worth."""
    worth = float(-prices @ of_z)
    if worth <= 0.0:
        return 0.0
    prices = prices / worth
    each = prices @ left
    cheapest = np.array([each[layer == k].min() for k in range(len(numbers))])
    return max(0.0, float(numbers @ cheapest - prices @ limits))


def _members(in_flight: IntArray) -> list[IntArray]:
    """The devices of each group."""
    before = in_flight[:, 0]
    values = np.unique(before)
    groups = np.array_split(values, min(MAX_GROUPS, len(values)))
    return [np.flatnonzero(np.isin(before, group)) for group in groups]


def _groups(problem: StageProblem, in_flight: IntArray) -> tuple[FloatArray, FloatArray]:
    """(devices, bytes for layers) of each group."""
    least = min(int(run.layer.transient_bytes.min()) for run in problem.runs)
    members = _members(in_flight)
    room = [float((problem.memory_bytes[of_group] - least).sum()) for of_group in members]
    return np.array([len(of_group) for of_group in members], float), np.array(room)


def _columns(
    problem: StageProblem, layers: list[LayerCosts], flights: Sequence[InFlight]
) -> _Columns:
    m = problem.num_microbatches
    each = [(g, k, n, layer) for g, n in enumerate(flights) for k, layer in enumerate(layers)]
    return _Columns(
        np.concatenate([np.full(len(x.total_s), g) for g, _, _, x in each]),
        np.concatenate([np.full(len(x.total_s), k) for _, k, _, x in each]),
        np.concatenate([x.total_s + x.sync_s / m for *_, x in each]),
        np.concatenate([x.total_s for *_, x in each]),
        np.concatenate([x.state_bytes + x.kept_bytes(n) for _, _, n, x in each]),
    )
