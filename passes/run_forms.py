"""The run level for an objective that is a maximum of linear forms.

Some step times are not a sum over layers: a pipeline is as slow as its slowest phase, and a
gradient reduction starts to count only when it takes longer than what hides it. Then every strategy
has several measures (seconds of different kinds), z is their sum over the layers, and

    minimise  max_f (a_f . z + c_f)   subject to the memory budget.

For any mix w of the forms (w >= 0, sum w = 1) the form  sum_f w_f (a_f . z + c_f)  lies below the
objective, and its relaxation is a hull (`run_dual`), so it bounds every plan. The bound is concave
in w; `best_support` climbs it by line searches from the mix so far towards the form that is largest
at the relaxed optimum. The rest is core enumeration under that bound (`run_core`), on the true
objective: exact for any w, faster for a good one.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from meshfold.passes.run.core import (
    RELATIVE_TIE,
    CoreResult,
    MaxOfForms,
    Part,
    Support,
    close_core,
)
from meshfold.passes.run.hull import FloatArray, IntArray, lower_hull, relaxed_point

MAX_MIXES = 8
MAX_LINE_STEPS = 40


def solve_forms(
    parts: Sequence[Part],
    objective: MaxOfForms,
    budget_bytes: int,
    *,
    incumbent_s: float = math.inf,
    node_cap: int,
) -> CoreResult:
    """The best counts of the parts, unless all are worse than incumbent_s.

    The least memory of the parts must fit the budget. The result's dual_s bounds the objective of
    every plan that fits.
    """
    objective = _without_idle_forms(parts, objective)
    sizes = [len(part.memory_bytes) for part in parts]
    useful = [_undominated_strategies(part, objective) for part in parts]
    parts = [
        Part(part.count, part.measures[:, kept], part.memory_bytes[kept])
        for part, kept in zip(parts, useful, strict=True)
    ]
    result = _solve_useful(parts, objective, budget_bytes, incumbent_s, node_cap)
    if result.plan is None:
        return result
    counts = [np.zeros(size, np.int64) for size in sizes]
    for full, kept, column in zip(counts, useful, result.plan.counts, strict=True):
        full[kept] = column
    return replace(result, plan=replace(result.plan, counts=tuple(counts)))


def _solve_useful(
    parts: Sequence[Part],
    objective: MaxOfForms,
    budget_bytes: int,
    incumbent_s: float,
    node_cap: int,
) -> CoreResult:
    """The same once idle forms and dominated strategies are gone."""
    parallel = _parallel_rows(objective)
    if parallel is None or len(objective.constants) == 1:
        support = best_support(parts, objective, budget_bytes)
        return close_core(
            parts, support, objective, budget_bytes, incumbent_s=incumbent_s, node_cap=node_cap
        )
    row, factors = parallel
    plain = MaxOfForms((row,), (0.0,))
    rising = MaxOfForms(tuple((factor,) for factor in factors.tolist()), objective.constants)
    support = best_support(parts, plain, budget_bytes)
    result = close_core(parts, support, plain, budget_bytes, node_cap=node_cap)
    plan = result.plan
    return replace(
        result,
        plan=None if plan is None else replace(plan, value_s=rising.value((plan.value_s,))),
        dual_s=rising.value((result.dual_s,)),
        first_s=rising.value((result.first_s,)),
    )


def _undominated_strategies(part: Part, objective: MaxOfForms) -> IntArray:
    """Strategies no other matches or beats in memory and in every form; of equals the first."""
    columns = np.vstack((np.array(objective.coefficients) @ part.measures, part.memory_bytes))
    better = (columns[:, :, None] <= columns[:, None, :]).all(axis=0)
    first = np.triu(np.ones_like(better), 1)
    beaten = (better & (~better.T | first)).any(axis=0)
    return np.flatnonzero(~beaten)


def _without_idle_forms(parts: Sequence[Part], objective: MaxOfForms) -> MaxOfForms:
    """The objective without the forms that another one is at least as large as on every plan."""
    rows, constants = np.array(objective.coefficients), np.array(objective.constants)
    kept = list(range(len(rows)))
    for form in range(len(rows)):
        for other in kept:
            lead = rows[form] - rows[other]
            most_s = constants[form] - constants[other]
            most_s += sum(part.count * float((lead @ part.measures).max()) for part in parts)
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


def best_support(parts: Sequence[Part], objective: MaxOfForms, budget_bytes: int) -> Support:
    """A mix of the forms with a relaxation as high as the line searches get it."""
    search = _MixSearch(parts, objective, budget_bytes)
    singles = [search.point(row) for row in np.eye(len(objective.constants))]
    best = max(singles, key=lambda point: point[1])
    for _ in range(MAX_MIXES):
        mix, bound_s, values = best
        steepest = int(np.argmax(values))
        if values[steepest] <= bound_s + RELATIVE_TIE * abs(bound_s):
            break
        found = search.climb(mix, np.eye(len(mix))[steepest])
        if found[1] <= bound_s + RELATIVE_TIE * abs(bound_s):
            break
        best = found
    return search.support(best[0])


_Point = tuple[FloatArray, float, FloatArray]
"""A mix, the bound of its relaxation and the values of all forms at the relaxed optimum."""


class _MixSearch:
    """Relaxations of one problem under different mixes of its forms."""

    def __init__(self, parts: Sequence[Part], objective: MaxOfForms, budget_bytes: int) -> None:
        self.parts, self.budget_bytes = parts, budget_bytes
        self.rows = np.array(objective.coefficients, float)
        self.constants = np.array(objective.constants, float)

    def support(self, mix: FloatArray) -> Support:
        """The mixed form with its hulls."""
        weights = mix @ self.rows
        hulls = tuple(lower_hull(weights @ p.measures, p.memory_bytes) for p in self.parts)
        return Support(weights, float(mix @ self.constants), hulls)

    def point(self, mix: FloatArray) -> _Point:
        """The relaxation under a mix."""
        support = self.support(mix)
        point = relaxed_point(support.hulls, [p.count for p in self.parts], self.budget_bytes)
        measures = np.zeros(self.rows.shape[1])
        for i, (part, hull) in enumerate(zip(self.parts, support.hulls, strict=True)):
            vertex = point.vertices[i]
            measures += part.count * part.measures[:, hull.strategies[vertex]]
            if i == point.between:
                step = hull.strategies[vertex : vertex + 2]
                measures += point.moved_layers * np.diff(part.measures[:, step], axis=1)[:, 0]
        values = self.rows @ measures + self.constants
        return mix, float(mix @ values), values

    def climb(self, start: FloatArray, end: FloatArray) -> _Point:
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
