"""A good assignment, and a lower bound, where elimination would need tables without end.

A region whose values all meet (every layer of a DenseNet reads every one before it) has an induced
width of its length, and no order helps. Here tables keep at most `most_entries`:

    assignment   Some variables are given the values that they have (a cutset), so that the rest can
                 be eliminated exactly; that is never worse. Then others are given, and so on, until
                 a few rounds in a row find nothing better: block coordinate descent.
    bound        Mini-buckets: where the tables of a variable would join into too large a one, they
                 are summed in several groups, each of which takes its own minimum over it, so
                     sum over groups of min_x  <=  min_x of the sum over groups.

(Dechter and Rish, Mini-buckets, 2003; cutset conditioning: Dechter, 1990.) Same tables in, same
assignment out.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshfold.passes.region.elimination import EliminationPlan, Factor, Table, min_fill_order

MOST_ENTRIES = 1 << 16
"""Of a table in one round: small, so that many rounds take no longer than one exact elimination."""
PATIENCE = 4
"""Rounds without a better assignment before the search ends."""
LEAST_GAIN = 1e-6
"""Of a round, relative: below, it counts as none."""
MOST_ROUNDS = 40


@dataclass(frozen=True, slots=True, eq=False)
class Conditioned:
    """values: of every variable; total: their sum of tables; lower: at most the least sum."""

    values: tuple[int, ...]
    total: float
    lower: float


def conditioned(
    domains: Sequence[int],
    factors: Sequence[Factor],
    start: Mapping[int, int],
    most_entries: int = MOST_ENTRIES,
) -> Conditioned | None:
    """A local optimum from `start`, the values of some variables that leave the others easy; None
    if the sum is infinite whatever these are."""
    problem = _Problem(domains, factors, most_entries)
    values, total = problem.given(start)
    if not math.isfinite(total):
        return None
    num_given = [0] * len(domains)
    rounds = idle = 0
    while idle < PATIENCE and rounds < MOST_ROUNDS:
        cut = problem.cutset(num_given)
        for v in cut:
            num_given[v] += 1
        better, new = problem.given({v: values[v] for v in cut})
        idle = 0 if new < total - LEAST_GAIN * abs(total) else idle + 1
        if new < total:
            values, total = better, new
        rounds += 1
    return Conditioned(values, total, min(problem.lower_bound(), total))


class _Problem:
    """domains, factors, most_entries: as of `conditioned`. order: of elimination."""

    def __init__(
        self, domains: Sequence[int], factors: Sequence[Factor], most_entries: int
    ) -> None:
        self.domains, self.factors, self.most_entries = domains, factors, most_entries
        self.order = min_fill_order(domains, [f.variables for f in factors])

    def cutset(self, num_given: Sequence[int]) -> set[int]:
        """Variables without which no table is too large: of those that meet in one, the one that
        was given least often, of these the one with most values."""
        cut: set[int] = set()
        live = [set(factor.variables) for factor in self.factors]
        for v in self.order:
            joined = set().union({v}, *(scope for scope in live if v in scope)) - cut
            while self._size(joined) > self.most_entries:
                worst = min(joined, key=lambda u: (num_given[u], -self.domains[u], u))
                cut.add(worst)
                joined.discard(worst)
            live = [scope for scope in live if v not in scope]
            live.append(joined - {v})
        return cut

    def given(self, values: Mapping[int, int]) -> tuple[tuple[int, ...], float]:
        """The best assignment with these values, exactly, and its sum."""
        scopes, tables = [], []
        for factor in self.factors:
            index = tuple(values.get(v, slice(None)) for v in factor.variables)
            scopes.append(tuple(v for v in factor.variables if v not in values))
            tables.append(np.asarray(factor.table[index]))
        order = [v for v in self.order if v not in values]
        found = EliminationPlan(self.domains, scopes, (), order).run(tables)
        best = found.assignment()
        return tuple(values.get(v, best[v]) for v in range(len(best))), float(found.table)

    def lower_bound(self) -> float:
        """At most the least sum of tables."""
        live: list[Factor] = list(self.factors)
        for v in self.order:
            live, used = (
                [f for f in live if v not in f.variables],
                [f for f in live if v in f.variables],
            )
            live += [_without(self.domains, v, group) for group in self._groups(used)]
        return float(sum(float(factor.table) for factor in live))

    def _groups(self, factors: Sequence[Factor]) -> Iterator[list[Factor]]:
        """Large tables first, each joins the first group that it keeps small."""
        groups: list[tuple[set[int], list[Factor]]] = []
        for factor in sorted(factors, key=lambda f: -f.table.size):
            mine = set(factor.variables)
            for scope, members in groups:
                if self._size(scope | mine) <= self.most_entries or mine <= scope:
                    scope |= mine
                    members.append(factor)
                    break
            else:
                groups.append((mine, [factor]))
        yield from (members for _, members in groups)

    def _size(self, variables: Collection[int]) -> int:
        return math.prod(self.domains[v] for v in variables)


def _without(domains: Sequence[int], variable: int, factors: Sequence[Factor]) -> Factor:
    """The least over `variable` of the sum of these tables."""
    scope = sorted({v for f in factors for v in f.variables} - {variable})
    numbers = {v: k for k, v in enumerate((*scope, variable))}
    plan = EliminationPlan(
        [domains[v] for v in numbers],
        [tuple(numbers[v] for v in f.variables) for f in factors],
        tuple(range(len(scope))),
        [len(scope)],
    )
    table: Table = plan.run([f.table for f in factors]).table
    return Factor(tuple(scope), table)
