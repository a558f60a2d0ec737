"""Core enumeration: closes the gap between the relaxation of a run and its best plan, exactly.

Given parts (layers that choose from one table each), a budget M and the price of memory p at M
(`run_dual`), every strategy s of part i has a regret against the part's base strategy b_i,

    r(i, s) = (t_s + p m_s) - (t_b + p m_b) >= 0,

and a plan with counts n costs  LP(M) + sum n_s r_s + p * (unused bytes).  Strategies of regret 0
are the base and, in one part, the strategy at the other end of the hull's edge at M: the *filler*.
So every plan is a multiset of *exchanges* (base -> s, at its regret) plus as many fillers as fit:

    for multisets of exchanges in order of total regret:            (_Core._multisets_by_regret)
        stop when LP(M) + regret >= the best plan found
        fill up with fillers, compare with the best plan            (_Core.fill)

Tables with many almost equal strategies have too many such multisets; after the first few hundred
they are merged by dominance instead (`run_merge`). A node cap ends either; then the result says so.

The number of layers appears nowhere but in the counts, so 1,000 layers cost what 8 do. Taking an
end of the edge instead of the mix is the classic mistake: feasible, and up to 20 % slow.
(Balas and Zemel 1980 and Pisinger 1995 call the few items that can still change the core.)

The objective may be a maximum of linear forms of several measures (`MaxOfForms`); then the bound is
that of a supporting mix of the forms, and fillers are chosen on the true objective, which is convex
in their number.
"""

import heapq
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshfold.passes.run.hull import FloatArray, Hull, IntArray, relaxed_point, sum_hulls
from meshfold.passes.run.merge import Exchanges, Filling, merge_exchanges

RELATIVE_TIE = 1e-12
"""Times this close are equal: above the rounding of sums of float64, far below any cost model."""

MOST_LISTED = 400
"""Multisets listed before going over to merging them by dominance (`run_merge`)."""

MAX_TIES = 200
"""Multisets looked at only to break ties by fewest strategies, memory and order."""


@dataclass(frozen=True, eq=False)
class Part:
    """`count` layers that choose from one table.

    measures: (number of measures, number of strategies), e.g. one row of seconds;
    memory_bytes: per strategy, int64.
    """

    count: int
    measures: FloatArray
    memory_bytes: IntArray


@dataclass(frozen=True)
class MaxOfForms:
    """max over rows f of  coefficients[f] . z + constants[f],  z the summed measures of a plan."""

    coefficients: tuple[tuple[float, ...], ...]
    constants: tuple[float, ...]

    def value(self, measures: Sequence[float]) -> float:
        """The objective at z, in seconds."""
        values: list[float] = [
            constant + sum(map(operator.mul, row, measures))
            for row, constant in zip(self.coefficients, self.constants, strict=True)
        ]
        return max(values)

    def slope(self, step: Sequence[float]) -> float:
        """Change of the first form along a step: of the objective, if it has no other form."""
        return float(sum(map(operator.mul, self.coefficients[0], step)))


SUM_OF_TIMES = MaxOfForms(((1.0,),), (0.0,))
"""The plain objective over one measure."""


@dataclass(frozen=True, eq=False)
class Support:
    """A linear function below the objective, with the hulls of the parts under it.

    weights: per measure; constant_s: added to the weighted sum; hulls[i]: of part i, its time the
    weighted measures.
    """

    weights: FloatArray
    constant_s: float
    hulls: tuple[Hull, ...]

    def bound_s(self, parts: Sequence[Part], budget_bytes: int) -> float:
        """LP(M) of the parts; infinite when not even the least memory fits."""
        total = sum_hulls(self.hulls, [part.count for part in parts])
        return float(total.time_at_s(budget_bytes)) + self.constant_s


@dataclass(frozen=True, eq=False)
class CorePlan:
    """Layers per strategy for each part, with value and memory of the whole."""

    value_s: float
    memory_bytes: int
    counts: tuple[IntArray, ...]

    def tie_key(self) -> tuple[int, int, tuple[int, ...]]:
        """Fewest distinct strategies, then least memory, then the strategies that come first."""
        flat = np.concatenate(self.counts)
        return int(np.count_nonzero(flat)), self.memory_bytes, tuple((-flat).tolist())


@dataclass(frozen=True, eq=False)
class CoreResult:
    """plan: the best found; None when nothing is as good as the incumbent.

    dual_s: LP(M). first_s: value of the rounded relaxation. nodes: multisets looked at. capped: the
    node cap was hit, so plan may not be the best.
    """

    plan: CorePlan | None
    dual_s: float
    first_s: float
    nodes: int
    capped: bool


def close_core(
    parts: Sequence[Part],
    support: Support,
    objective: MaxOfForms,
    budget_bytes: int,
    *,
    incumbent_s: float = math.inf,
    node_cap: int,
) -> CoreResult:
    """The best counts of the parts under the budget, unless all are worse than incumbent_s.

    The least memory of the parts must fit. Plans as good as the incumbent are returned.
    """
    core = _Core(parts, support, objective, budget_bytes)
    first_s = core.fill((), core.start)
    nodes, is_done = core.list_multisets(incumbent_s, min(node_cap, MOST_LISTED))
    if not is_done and nodes < node_cap:
        states, is_done = core.merge_multisets(incumbent_s, node_cap)
        nodes += states
    plan = None if is_below(incumbent_s, core.best_s) else core.best
    return CoreResult(plan, core.dual_s, first_s, nodes, not is_done)


def is_below(left_s: float, right_s: float) -> bool:
    """Whether left is smaller by more than rounding."""
    return (
        left_s < right_s - RELATIVE_TIE * abs(right_s)
        if math.isfinite(right_s)
        else (left_s < right_s)
    )


@dataclass(frozen=True)
class _Exchange:
    """One layer of `part` takes `strategy` instead of the part's base."""

    regret_s: float
    part: int
    strategy: int
    extra_bytes: int
    extra_measures: tuple[float, ...]


class _Reached(NamedTuple):
    """A plan of bases and exchanges: bytes left, measures, exchanged layers per part."""

    free_bytes: int
    measures: tuple[float, ...]
    used: tuple[int, ...]

    def after(self, exchange: _Exchange) -> "_Reached":
        """With one more exchange."""
        part = exchange.part
        return _Reached(
            self.free_bytes - exchange.extra_bytes,
            tuple(map(operator.add, self.measures, exchange.extra_measures)),
            (*self.used[:part], self.used[part] + 1, *self.used[part + 1 :]),
        )


class _Core:
    """One problem at its price: bases, filler, exchanges and the best plan so far."""

    def __init__(
        self, parts: Sequence[Part], support: Support, objective: MaxOfForms, budget_bytes: int
    ) -> None:
        self.parts, self.objective, self.budget_bytes = parts, objective, budget_bytes
        counts = [part.count for part in parts]
        relaxed = relaxed_point(support.hulls, counts, budget_bytes)
        self.filler_part = relaxed.between
        self.bases = [
            int(hull.strategies[vertex])
            for hull, vertex in zip(support.hulls, relaxed.vertices, strict=True)
        ]
        self.exchanges = _exchanges(parts, self.bases, support.weights, relaxed.price)
        self.filler: _Exchange | None = None
        if self.filler_part >= 0:
            hull = support.hulls[self.filler_part]
            end = int(hull.strategies[relaxed.vertices[self.filler_part] + 1])
            is_filler = [(e.part, e.strategy) == (self.filler_part, end) for e in self.exchanges]
            self.filler = self.exchanges.pop(is_filler.index(True))
        base_columns = list(zip(parts, self.bases, strict=True))
        free_bytes = budget_bytes - sum(p.count * int(p.memory_bytes[b]) for p, b in base_columns)
        measures = tuple(
            math.fsum(p.count * float(p.measures[row, b]) for p, b in base_columns)
            for row in range(len(support.weights))
        )
        self.start = _Reached(free_bytes, measures, (0,) * len(parts))
        self.dual_s = support.bound_s(parts, budget_bytes)
        self.best_s = math.inf
        self.best: CorePlan | None = None

    def list_multisets(self, incumbent_s: float, node_cap: int) -> tuple[int, bool]:
        """Fills multisets in order of regret; how many, and whether that proves the best plan."""
        nodes, ties = 1, 0
        for regret_s, chosen, reached in self._multisets_by_regret():
            best_s = min(incumbent_s, self.best_s)
            bound_s = self.dual_s + regret_s
            if not is_below(bound_s, best_s):
                ties += 1
                if is_below(best_s, bound_s) or ties > MAX_TIES:
                    return nodes, True
            if nodes >= node_cap:
                return nodes, False
            nodes += 1
            self.fill(chosen, reached)
        return nodes, True

    def _multisets_by_regret(self) -> Iterator[tuple[float, tuple[int, ...], "_Reached"]]:
        """Nonempty multisets of exchanges (ascending indices) in order of total regret.

        Each multiset is reached once: from the one without its last index by appending, or from the
        one with a smaller last index by raising it. Both only add regret.
        """
        heap: list[tuple[float, tuple[int, ...], float, _Reached]] = []
        if self.exchanges:
            heap.append((self.exchanges[0].regret_s, (0,), 0.0, self.start))
        while heap:
            regret_s, chosen, before_s, before = heapq.heappop(heap)
            index = chosen[-1]
            exchange = self.exchanges[index]
            if before.used[exchange.part] < self.parts[exchange.part].count:
                reached = before.after(exchange)
                yield regret_s, chosen, reached
                longer = (*chosen, index)
                heapq.heappush(heap, (regret_s + exchange.regret_s, longer, regret_s, reached))
            if index + 1 < len(self.exchanges):
                raised_s = before_s + self.exchanges[index + 1].regret_s
                heapq.heappush(heap, (raised_s, (*chosen[:-1], index + 1), before_s, before))

    def merge_multisets(self, incumbent_s: float, state_cap: int) -> tuple[int, bool]:
        """Merges multisets by dominance instead; states kept, and whether that proves the best."""
        rows = np.array(self.objective.coefficients)
        extra = np.array([exchange.extra_measures for exchange in self.exchanges])
        exchanges = Exchanges(
            np.array([exchange.regret_s for exchange in self.exchanges]),
            np.array([exchange.part for exchange in self.exchanges]),
            np.array([exchange.extra_bytes for exchange in self.exchanges]),
            extra @ rows.T,
        )
        filling = Filling(
            np.array([part.count for part in self.parts]),
            self.start.free_bytes,
            rows @ np.array(self.start.measures) + np.array(self.objective.constants),
            self.filler_part,
            0 if self.filler is None else self.filler.extra_bytes,
            np.zeros(len(rows)) if self.filler is None else rows @ self.filler.extra_measures,
        )
        limit_s = min(incumbent_s, self.best_s) * (1 - RELATIVE_TIE)
        merged = merge_exchanges(
            exchanges, filling, dual_s=self.dual_s, limit_s=limit_s, state_cap=state_cap
        )
        if merged.chosen is not None:
            reached = self.start
            for index in merged.chosen:
                reached = reached.after(self.exchanges[index])
            self.fill(merged.chosen, reached)
        return merged.states, not merged.capped

    def fill(self, chosen: Sequence[int], reached: "_Reached") -> float:
        """Value of the plan of these exchanges and the best number of fillers; kept if best."""
        if reached.free_bytes < 0:
            return math.inf
        measures, fillers = reached.measures, 0
        if self.filler is not None:
            layers = self.parts[self.filler_part].count - reached.used[self.filler_part]
            most = min(layers, reached.free_bytes // self.filler.extra_bytes)
            fillers = self._best_fillers(measures, self.filler.extra_measures, most)
            measures = _moved(measures, self.filler.extra_measures, fillers)
        value_s = self.objective.value(measures)
        if not is_below(self.best_s, value_s):
            self._keep(chosen, fillers)
        return value_s

    def _best_fillers(self, start: Sequence[float], step: Sequence[float], most: int) -> int:
        """The fewest fillers of least value: a bisection on the slope of a convex function."""
        if len(self.objective.constants) == 1:
            return most if self.objective.slope(step) < 0 else 0
        low, high = 0, most
        while low < high:
            middle = (low + high) // 2
            here_s = self.objective.value(_moved(start, step, middle))
            if self.objective.value(_moved(start, step, middle + 1)) < here_s:
                low = middle + 1
            else:
                high = middle
        return low

    def _keep(self, chosen: Sequence[int], fillers: int) -> None:
        """Makes this plan the best one if it is faster, or as fast and first in tie order."""
        counts = [np.zeros(len(part.memory_bytes), np.int64) for part in self.parts]
        for part, base, column in zip(self.parts, self.bases, counts, strict=True):
            column[base] = part.count
        taken = [self.exchanges[index] for index in chosen]
        for exchange, times in [(e, 1) for e in taken] + (
            [(self.filler, fillers)] if self.filler is not None else []
        ):
            counts[exchange.part][exchange.strategy] += times
            counts[exchange.part][self.bases[exchange.part]] -= times
        plan = self._evaluated(tuple(counts))
        better = self.best is None or is_below(plan.value_s, self.best_s)
        if better or (self.best is not None and plan.tie_key() < self.best.tie_key()):
            self.best = plan
        self.best_s = min(self.best_s, plan.value_s)

    def _evaluated(self, counts: tuple[IntArray, ...]) -> CorePlan:
        """Value and memory of counts, from scratch: independent of the way they were found."""
        rows = range(len(self.start.measures))
        measures = [
            math.fsum(
                value
                for part, column in zip(self.parts, counts, strict=True)
                for value in (part.measures[row] * column).tolist()
            )
            for row in rows
        ]
        memory = sum(
            int(part.memory_bytes @ column) for part, column in zip(self.parts, counts, strict=True)
        )
        return CorePlan(self.objective.value(measures), memory, counts)


def _moved(start: Sequence[float], step: Sequence[float], times: int) -> tuple[float, ...]:
    return tuple([a + times * b for a, b in zip(start, step, strict=True)])


def _exchanges(
    parts: Sequence[Part], bases: Sequence[int], weights: FloatArray, price: float
) -> list[_Exchange]:
    """All exchanges away from the bases, by regret."""
    found = []
    for i, (part, base) in enumerate(zip(parts, bases, strict=True)):
        extra_measures = part.measures - part.measures[:, base : base + 1]
        extra_bytes = part.memory_bytes - part.memory_bytes[base]
        regrets = np.maximum(weights @ extra_measures + price * extra_bytes, 0.0).tolist()
        columns = zip(regrets, extra_bytes.tolist(), extra_measures.T.tolist(), strict=True)
        found += [
            _Exchange(regret_s, i, strategy, extra, tuple(measures))
            for strategy, (regret_s, extra, measures) in enumerate(columns)
            if strategy != base
        ]
    return sorted(found, key=lambda e: (e.regret_s, e.part, e.strategy))
