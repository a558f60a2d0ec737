"""Core enumeration: closes the gap between the relaxation of a run and its best plan, exactly.

Given layer groups (layers that choose from one table each), a budget M and the price of memory p at
M (passes/run/hull.py), every strategy s of group i has a regret against the base strategy b_i,

    r(i, s) = (t_s + p m_s) - (t_b + p m_b) >= 0,

and a plan with counts n costs  LP(M) + sum n_s r_s + p * (unused bytes).  Strategies of regret 0
are the base and, in one group, the strategy at the other end of the hull's edge at M: the *filler*.
So every plan is a multiset of *exchanges* (base -> s, at its regret) plus as many fillers as fit:

    for multisets of exchanges in order of total regret:            (Core._multisets_by_regret)
        stop when LP(M) + regret >= the best plan found
        fill up with fillers, compare with the best plan            (Core.fill)

Tables with many almost equal strategies have too many such multisets; after the first few hundred
they are pruned by dominance instead (passes/run/merge.py). A node cap ends either; then the result
says so.

The number of layers appears nowhere but in the counts, so 1,000 layers cost what 8 do. Taking an
end of the edge instead of the mix is the classic mistake: feasible, and up to 20 % slow.
(Balas and Zemel 1980 and Pisinger 1995 call the few items that can still change the core.)
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshfold.passes.run.hull import FloatArray, Hull, IntArray, relaxed_point, sum_hulls
from meshfold.passes.run.merge import Exchanges, Filling, merge_exchanges

RELATIVE_TIE = 1e-12
"""Times this close are equal: above the rounding of sums of float64, far below any cost model."""

MOST_LISTED = 400
"""Multisets listed before going over to pruning them by dominance (passes/run/merge.py)."""

MAX_TIES = 200
"""Multisets looked at only to break ties by fewest strategies, memory and order."""


@dataclass(frozen=True, eq=False)
class LayerGroup:
    """Layers that choose from one table."""

    count: int
    time_s: FloatArray
    """Seconds of a layer under each strategy."""

    memory_bytes: IntArray
    """Bytes of a layer under each strategy, int64."""

    hull: Hull
    """The lower hull of the table."""


def relaxed_time_s(groups: Sequence[LayerGroup], budget_bytes: int) -> float:
    """LP(M) of the groups; infinite when not even the least memory fits."""
    total = sum_hulls([group.hull for group in groups], [group.count for group in groups])
    return float(total.time_at_s(budget_bytes))


@dataclass(frozen=True, eq=False)
class CorePlan:
    """Layers per strategy for each group, with time and memory of all."""

    time_s: float
    memory_bytes: int
    counts: tuple[IntArray, ...]

    def tie_key(self) -> tuple[int, int, tuple[int, ...]]:
        """Fewest distinct strategies, then least memory, then the strategies that come first."""
        flat = np.concatenate(self.counts)
        return int(np.count_nonzero(flat)), self.memory_bytes, tuple((-flat).tolist())


@dataclass(frozen=True, eq=False)
class CoreResult:
    """What the enumeration found and proved."""

    plan: CorePlan | None
    """The best found; None when nothing is as good as the incumbent."""

    dual_s: float
    """LP(M)."""

    first_s: float
    """Time of the rounded relaxation."""

    nodes: int
    """Multisets looked at."""

    capped: bool
    """The node cap was hit, so plan may not be the best."""


def close_core(
    groups: Sequence[LayerGroup],
    budget_bytes: int,
    *,
    constant_s: float = 0.0,
    incumbent_s: float = math.inf,
    node_cap: int,
) -> CoreResult:
    """The best counts of the groups under the budget, unless all are worse than incumbent_s.

    The least memory of the groups must fit. constant_s: added to the time of every plan. Plans as
    good as the incumbent are returned.
    """
    core = Core(groups, budget_bytes, constant_s)
    first_s = core.fill((), core.start)
    nodes, is_done = core.list_multisets(incumbent_s, min(node_cap, MOST_LISTED))
    if not is_done and nodes < node_cap:
        states, is_done = core.merge_multisets(incumbent_s, node_cap)
        nodes += states
    return core.result(first_s, incumbent_s, nodes, capped=not is_done)


def is_below(left_s: float, right_s: float) -> bool:
    """Whether left is smaller by more than rounding."""
    return (
        left_s < right_s - RELATIVE_TIE * abs(right_s)
        if math.isfinite(right_s)
        else (left_s < right_s)
    )


@dataclass(frozen=True)
class Exchange:
    """One layer of `group` takes `strategy` instead of the group's base."""

    regret_s: float
    group: int
    strategy: int
    extra_bytes: int
    extra_s: float


class Reached(NamedTuple):
    """A plan of bases and exchanges: bytes left, seconds, exchanged layers per group."""

    free_bytes: int
    time_s: float
    used: tuple[int, ...]

    def after(self, exchange: Exchange) -> "Reached":
        """This state with one more exchange."""
        group = exchange.group
        return Reached(
            self.free_bytes - exchange.extra_bytes,
            self.time_s + exchange.extra_s,
            (*self.used[:group], self.used[group] + 1, *self.used[group + 1 :]),
        )


class Core:
    """One problem at its price: bases, filler, exchanges and the best plan so far."""

    def __init__(
        self, groups: Sequence[LayerGroup], budget_bytes: int, constant_s: float = 0.0
    ) -> None:
        self.groups, self.constant_s = groups, constant_s
        hulls = [group.hull for group in groups]
        relaxed = relaxed_point(hulls, [group.count for group in groups], budget_bytes)
        self.filler_group = relaxed.between
        self.bases = [
            int(hull.strategies[vertex])
            for hull, vertex in zip(hulls, relaxed.vertices, strict=True)
        ]
        self.exchanges = _exchanges(groups, self.bases, relaxed.price)
        self.filler: Exchange | None = None
        if self.filler_group >= 0:
            hull = hulls[self.filler_group]
            end = int(hull.strategies[relaxed.vertices[self.filler_group] + 1])
            is_filler = [(e.group, e.strategy) == (self.filler_group, end) for e in self.exchanges]
            self.filler = self.exchanges.pop(is_filler.index(True))
        columns = list(zip(groups, self.bases, strict=True))
        free_bytes = budget_bytes - sum(g.count * int(g.memory_bytes[b]) for g, b in columns)
        time_s = math.fsum(g.count * float(g.time_s[b]) for g, b in columns)
        self.start = Reached(free_bytes, time_s, (0,) * len(groups))
        self.dual_s = relaxed_time_s(groups, budget_bytes) + constant_s
        self.best_s = math.inf
        self.best: CorePlan | None = None

    def result(self, first_s: float, incumbent_s: float, nodes: int, *, capped: bool) -> CoreResult:
        """The best plan so far, unless the incumbent is better."""
        plan = None if is_below(incumbent_s, self.best_s) else self.best
        return CoreResult(plan, self.dual_s, first_s, nodes, capped)

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

    def _multisets_by_regret(self) -> Iterator[tuple[float, tuple[int, ...], Reached]]:
        """Nonempty multisets of exchanges (ascending indices) in order of total regret.

        Each multiset is reached once: from the one without its last index by appending, or from the
        one with a smaller last index by raising it. Both only add regret.
        """
        heap: list[tuple[float, tuple[int, ...], float, Reached]] = []
        if self.exchanges:
            heap.append((self.exchanges[0].regret_s, (0,), 0.0, self.start))
        while heap:
            regret_s, chosen, before_s, before = heapq.heappop(heap)
            index = chosen[-1]
            exchange = self.exchanges[index]
            if before.used[exchange.group] < self.groups[exchange.group].count:
                reached = before.after(exchange)
                yield regret_s, chosen, reached
                longer = (*chosen, index)
                heapq.heappush(heap, (regret_s + exchange.regret_s, longer, regret_s, reached))
            if index + 1 < len(self.exchanges):
                raised_s = before_s + self.exchanges[index + 1].regret_s
                heapq.heappush(heap, (raised_s, (*chosen[:-1], index + 1), before_s, before))

    def merge_multisets(self, incumbent_s: float, state_cap: int) -> tuple[int, bool]:
        """Merges multisets by dominance instead; states seen, and whether that proves the best."""
        exchanges = Exchanges(
            np.array([exchange.regret_s for exchange in self.exchanges]),
            np.array([exchange.group for exchange in self.exchanges]),
            np.array([exchange.extra_bytes for exchange in self.exchanges]),
            np.array([exchange.extra_s for exchange in self.exchanges]),
        )
        filling = Filling(
            np.array([group.count for group in self.groups]),
            self.start.free_bytes,
            self.start.time_s + self.constant_s,
            self.filler_group,
            0 if self.filler is None else self.filler.extra_bytes,
            0.0 if self.filler is None else self.filler.extra_s,
        )
        limit_s = min(incumbent_s, self.best_s) * (1 - RELATIVE_TIE)
        found = merge_exchanges(
            exchanges, filling, dual_s=self.dual_s, limit_s=limit_s, state_cap=state_cap
        )
        if found.chosen is not None:
            reached = self.start
            for index in found.chosen:
                reached = reached.after(self.exchanges[index])
            self.fill(found.chosen, reached)
        return found.states, not found.capped

    def fill(self, chosen: Sequence[int], reached: Reached) -> float:
        """Time of the plan of these exchanges and all fillers that fit; remembered if best."""
        if reached.free_bytes < 0:
            return math.inf
        time_s, fillers = reached.time_s, self.most_fillers(reached)
        if self.filler is not None:
            time_s += fillers * self.filler.extra_s
        self.keep(chosen, fillers, self.constant_s + time_s)
        return self.constant_s + time_s

    def most_fillers(self, reached: Reached) -> int:
        """How many fillers fit; each takes memory and saves time, as the hull falls."""
        if self.filler is None:
            return 0
        layers = self.groups[self.filler_group].count - reached.used[self.filler_group]
        return min(layers, reached.free_bytes // self.filler.extra_bytes)

    def keep(self, chosen: Sequence[int], fillers: int, time_s: float) -> None:
        """Makes this plan the best one if it is faster, or as fast and first in tie order."""
        if is_below(self.best_s, time_s):
            return
        counts = [np.zeros(len(group.memory_bytes), np.int64) for group in self.groups]
        for group, base, column in zip(self.groups, self.bases, counts, strict=True):
            column[base] = group.count
        steps = [(self.exchanges[index], 1) for index in chosen]
        steps += [(self.filler, fillers)] if self.filler is not None else []
        for exchange, times in steps:
            counts[exchange.group][exchange.strategy] += times
            counts[exchange.group][self.bases[exchange.group]] -= times
        memory = sum(
            int(group.memory_bytes @ column)
            for group, column in zip(self.groups, counts, strict=True)
        )
        plan = CorePlan(self.plan_time_s(counts), memory, tuple(counts))
        better = self.best is None or is_below(plan.time_s, self.best_s)
        if better or (self.best is not None and plan.tie_key() < self.best.tie_key()):
            self.best = plan
        self.best_s = min(self.best_s, plan.time_s)

    def plan_time_s(self, counts: Sequence[IntArray]) -> float:
        """Time of counts, from scratch: independent of the way they were found."""
        return self.constant_s + math.fsum(
            seconds
            for group, column in zip(self.groups, counts, strict=True)
            for seconds in (group.time_s * column).tolist()
        )


def _exchanges(groups: Sequence[LayerGroup], bases: Sequence[int], price: float) -> list[Exchange]:
    """All exchanges away from the bases, by regret."""
    found = []
    for i, (group, base) in enumerate(zip(groups, bases, strict=True)):
        extra_s = group.time_s - group.time_s[base]
        extra_bytes = group.memory_bytes - group.memory_bytes[base]
        regrets = np.maximum(extra_s + price * extra_bytes, 0.0).tolist()
        columns = zip(regrets, extra_bytes.tolist(), extra_s.tolist(), strict=True)
        found += [
            Exchange(regret_s, i, strategy, extra, seconds)
            for strategy, (regret_s, extra, seconds) in enumerate(columns)
            if strategy != base
        ]
    return sorted(found, key=lambda e: (e.regret_s, e.group, e.strategy))
