"""Core enumeration for an objective that is a maximum of linear forms.

Some step times are not a sum over layers: a pipeline is as slow as its slowest phase, and a
gradient reduction starts to count only when it takes longer than what hides it. Then every strategy
has several measures (seconds of different kinds), z is their sum over the layers, and

    minimise  max_f (a_f . z + c_f)   subject to the memory budget.

For any mix w of the forms (w >= 0, sum w = 1) the form  sum_f w_f (a_f . z + c_f)  lies below the
objective, and its relaxation is a hull (passes/run/hull.py), so it bounds every plan. The bound is
concave in w; `best_mix` climbs it by line searches from the mix so far towards the form that is
largest at the relaxed optimum. The rest is core enumeration under that bound (passes/run/core.py),
on the true objective: exact for any w, faster for a good one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshfold.passes.run.core import (
    RELATIVE_TIE,
    Core,
    CoreResult,
    Exchange,
    LayerGroup,
    Reached,
    close_core,
    relaxed_time_s,
)
from meshfold.passes.run.hull import FloatArray, IntArray, lower_hull, relaxed_point

MAX_MIXES = 8
MAX_LINE_STEPS = 40


@dataclass(frozen=True, eq=False)
class MeasuredLayers:
    """`count` layers that choose from one table.

    measures: (number of measures, number of strategies), rows of seconds; memory_bytes: per
    strategy, int64.
    """

    count: int
    measures: FloatArray
    memory_bytes: IntArray


@dataclass(frozen=True)
class MaxOfForms:
    """max over rows f of  coefficients[f] . z + constants[f],  z the summed measures of a plan."""

    coefficients: tuple[tuple[float, ...], ...]
    constants: tuple[float, ...]

    def value(self, measures: FloatArray) -> float:
        """The objective at z, in seconds."""
        return float((np.array(self.coefficients) @ measures + self.constants).max())


@dataclass(frozen=True, eq=False)
class Mix:
    """One mixed form: a linear function below the objective. weights: per measure; constant_s:
    added to the weighted sum; groups: the layers, their time the weighted measures."""

    weights: FloatArray
    constant_s: float
    groups: tuple[LayerGroup, ...]

    def bound_s(self, budget_bytes: int) -> float:
        """No plan has a smaller objective."""
        return relaxed_time_s(self.groups, budget_bytes) + self.constant_s


def solve_forms(
    layers: Sequence[MeasuredLayers],
    objective: MaxOfForms,
    budget_bytes: int,
    *,
    incumbent_s: float = math.inf,
    node_cap: int,
) -> CoreResult:
    """The best counts of strategies, unless all are worse than incumbent_s.

    The least memory of the layers must fit the budget. The result's dual_s bounds the objective of
    every plan that fits.
    """
    objective = _without_idle_forms(layers, objective)
    sizes = [len(each.memory_bytes) for each in layers]
    useful = [_undominated_strategies(each, objective) for each in layers]
    layers = [
        MeasuredLayers(each.count, each.measures[:, kept], each.memory_bytes[kept])
        for each, kept in zip(layers, useful, strict=True)
    ]
    result = _solve_useful(layers, objective, budget_bytes, incumbent_s, node_cap)
    if result.plan is None:
        return result
    counts = [np.zeros(size, np.int64) for size in sizes]
    for full, kept, column in zip(counts, useful, result.plan.counts, strict=True):
        full[kept] = column
    return replace(result, plan=replace(result.plan, counts=tuple(counts)))


def _solve_useful(
    layers: Sequence[MeasuredLayers],
    objective: MaxOfForms,
    budget_bytes: int,
    incumbent_s: float,
    node_cap: int,
) -> CoreResult:
    """The same once idle forms and dominated strategies are gone."""
    parallel = _parallel_rows(objective)
    if parallel is None:
        mix = best_mix(layers, objective, budget_bytes)
        core = _FormsCore(layers, mix, objective, budget_bytes)
        first_s = core.fill((), core.start)
        nodes, is_done = core.list_multisets(incumbent_s, node_cap)
        return core.result(first_s, incumbent_s, nodes, capped=not is_done)
    row, factors = parallel
    groups = _groups(layers, np.array(row))
    result = close_core(groups, budget_bytes, node_cap=node_cap)

    def risen_s(value: float) -> float:
        return float((factors * value + objective.constants).max())

    assert result.plan is not None, "the least memory fits"
    plan = replace(result.plan, time_s=risen_s(result.plan.time_s))
    return replace(
        result,
        plan=plan if plan.time_s <= incumbent_s else None,
        dual_s=risen_s(result.dual_s),
        first_s=risen_s(result.first_s),
    )


def _groups(layers: Sequence[MeasuredLayers], weights: FloatArray) -> tuple[LayerGroup, ...]:
    """The layers with their weighted measures as times."""
    return tuple(
        LayerGroup(
            each.count,
            weights @ each.measures,
            each.memory_bytes,
            lower_hull(weights @ each.measures, each.memory_bytes),
        )
        for each in layers
    )


class _FormsCore(Core):
    """Exchanges in the order of their regret under a mix; plans are compared by the objective."""

    def __init__(
        self,
        layers: Sequence[MeasuredLayers],
        mix: Mix,
        objective: MaxOfForms,
        budget_bytes: int,
    ) -> None:
        super().__init__(mix.groups, budget_bytes, mix.constant_s)
        self.layers = layers
        self.rows = np.array(objective.coefficients)
        self.constants = np.array(objective.constants)

    def fill(self, chosen: Sequence[int], reached: Reached) -> float:
        """Objective of the plan of these exchanges and the best number of fillers: the fewest of
        least value, by bisection on the slope of a convex function."""
        if reached.free_bytes < 0:
            return math.inf
        values = self.constants + sum(
            each.count * (self.rows @ each.measures[:, base])
            for each, base in zip(self.layers, self.bases, strict=True)
        )
        for index in chosen:
            values = values + self._extra_s(self.exchanges[index])
        step = np.zeros(len(values)) if self.filler is None else self._extra_s(self.filler)
        low, high = 0, self.most_fillers(reached)
        while low < high:
            middle = (low + high) // 2
            if (values + (middle + 1) * step).max() < (values + middle * step).max():
                low = middle + 1
            else:
                high = middle
        value_s = float((values + low * step).max())
        self.keep(chosen, low, value_s)
        return value_s

    def _extra_s(self, exchange: Exchange) -> FloatArray:
        """What an exchange adds to every form."""
        measures = self.layers[exchange.group].measures
        base = self.bases[exchange.group]
        return np.asarray(self.rows @ (measures[:, exchange.strategy] - measures[:, base]))

    def plan_time_s(self, counts: Sequence[IntArray]) -> float:
        """The objective of counts."""
        measures = sum(
            each.measures @ column for each, column in zip(self.layers, counts, strict=True)
        )
        return float((self.rows @ measures + self.constants).max())


def _undominated_strategies(layers: MeasuredLayers, objective: MaxOfForms) -> IntArray:
    """Strategies no other matches or beats in memory and in every form; of equals the first."""
    columns = np.vstack((np.array(objective.coefficients) @ layers.measures, layers.memory_bytes))
    better = (columns[:, :, None] <= columns[:, None, :]).all(axis=0)
    first = np.triu(np.ones_like(better), 1)
    beaten = (better & (~better.T | first)).any(axis=0)
    return np.flatnonzero(~beaten)


def _without_idle_forms(layers: Sequence[MeasuredLayers], objective: MaxOfForms) -> MaxOfForms:
    """The objective without the forms that another one is at least as large as on every plan."""
    rows, constants = np.array(objective.coefficients), np.array(objective.constants)
    kept = list(range(len(rows)))
    for form in range(len(rows)):
        for other in kept:
            lead = rows[form] - rows[other]
            most_s = constants[form] - constants[other]
            most_s += sum(each.count * float((lead @ each.measures).max()) for each in layers)
            if other != form and most_s <= 0:
                kept.remove(form)
                break
    return MaxOfForms(
        tuple(objective.coefficients[form] for form in kept),
        tuple(objective.constants[form] for form in kept),
    )


def _parallel_rows(objective: MaxOfForms) -> tuple[tuple[float, ...], FloatArray] | None:
    """One row that all rows are multiples >= 0 of, with the factors; None when there is none.

    Then the objective only rises with that one form, so its least value is at the same plan.
    """
    rows = np.array(objective.coefficients)
    longest = int(np.argmax((rows**2).sum(axis=1)))
    row = rows[longest]
    if not row.any():
        return None
    factors = rows @ row / (row @ row)
    if np.any(factors < 0) or not np.allclose(factors[:, None] * row, rows, rtol=1e-14, atol=0.0):
        return None
    return objective.coefficients[longest], factors


def best_mix(layers: Sequence[MeasuredLayers], objective: MaxOfForms, budget_bytes: int) -> Mix:
    """A mix of the forms with a relaxation as high as the line searches get it."""
    search = _MixSearch(layers, objective, budget_bytes)
    singles = [search.point(row) for row in np.eye(len(objective.constants))]
    best = max(singles, key=lambda point: point[1])
    for _ in range(MAX_MIXES):
        mix, bound_s, values = best
        steepest = int(np.argmax(values))
        if values[steepest] <= bound_s + RELATIVE_TIE * abs(bound_s):
            break
        found = search.highest_between(mix, np.eye(len(mix))[steepest])
        if found[1] <= bound_s + RELATIVE_TIE * abs(bound_s):
            break
        best = found
    return search.mixed(best[0])


_Point = tuple[FloatArray, float, FloatArray]
"""A mix, the bound of its relaxation and the values of all forms at the relaxed optimum."""


class _MixSearch:
    """Relaxations of one problem under different mixes of its forms."""

    def __init__(
        self, layers: Sequence[MeasuredLayers], objective: MaxOfForms, budget_bytes: int
    ) -> None:
        self.layers, self.budget_bytes = layers, budget_bytes
        self.rows = np.array(objective.coefficients, float)
        self.constants = np.array(objective.constants, float)

    def mixed(self, mix: FloatArray) -> Mix:
        """The form of a mix."""
        weights = mix @ self.rows
        return Mix(weights, float(mix @ self.constants), _groups(self.layers, weights))

    def point(self, mix: FloatArray) -> _Point:
        """The relaxation under a mix."""
        hulls = [group.hull for group in self.mixed(mix).groups]
        point = relaxed_point(hulls, [each.count for each in self.layers], self.budget_bytes)
        measures = np.zeros(self.rows.shape[1])
        for i, (each, hull) in enumerate(zip(self.layers, hulls, strict=True)):
            vertex = point.vertices[i]
            measures += each.count * each.measures[:, hull.strategies[vertex]]
            if i == point.between:
                step = hull.strategies[vertex : vertex + 2]
                measures += point.moved_layers * np.diff(each.measures[:, step], axis=1)[:, 0]
        values = self.rows @ measures + self.constants
        return mix, float(mix @ values), values

    def highest_between(self, start: FloatArray, end: FloatArray) -> _Point:
        """The highest bound on the way from one mix to another, by intersecting tangents."""
        low, high = self.point(start), self.point(end)
        best = max(low, high, key=lambda point: point[1])
        at_low, at_high = 0.0, 1.0
        for _ in range(MAX_LINE_STEPS):
            rise_low = float((end - start) @ low[2])
            rise_high = float((end - start) @ high[2])
            if rise_low <= 0 or rise_high >= 0:
                break
            gap = high[1] - rise_high * (at_high - at_low) - low[1]
            at = at_low + gap / (rise_low - rise_high)
            line_s = low[1] + rise_low * (at - at_low)
            found = self.point(start + at * (end - start))
            best = max(best, found, key=lambda point: point[1])
            if found[1] >= line_s - RELATIVE_TIE * abs(line_s):
                break
            if (end - start) @ found[2] > 0:
                low, at_low = found, at
            else:
                high, at_high = found, at
        return best
