"""Exact minimum of a sum of tables by (min,+) variable elimination.

Given variables x_0..x_{n-1}, x_i in {0..domains[i]-1}, and factors f_j, each a table over a few of
them, find for every value of the kept variables K

    T[x_K] = min over the other x of  sum_j f_j[x_scope(j)]              (EliminationPlan.run)

One variable after the other leaves. With F_v the factors that mention v and N(v) the other
variables in them, v leaves behind one new factor over N(v):

    g_v[x_N(v)] = min_{x_v} sum_{f in F_v} f[x_scope(f)]                                   (_Sum)

and the minimising x_v is recorded, so that an assignment is read back in reverse order
(Elimination.assignment). The order is greedy min-fill: the variable whose neighbours lack the
fewest edges among each other leaves first, ties to the smaller new table, then the smaller number;
kept variables never leave. (Dechter, Bucket elimination, 1999; Kjaerulff, Triangulation of graphs,
1990.) Time and memory are O(n * largest table), exponential only in the induced width, which is 2
or 3 on regions of real models. Same tables in, same assignment out: every tie goes to the lower
index. Entries may be +inf (forbidden), never nan.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A table over `variables`, one array dim per variable in that order, no variable twice."""

    variables: tuple[int, ...]
    table: Table


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """`variable` left; `choice[x_scope]` is its best value."""

    variable: int
    scope: tuple[int, ...]
    choice: NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class Elimination:
    """kept: the variables that were not eliminated; table: T over them, in that order.

    width: most neighbours a variable had when it left; largest_table: most entries of a table that
    was summed up, the measure of time and memory. Both for one value of each kept variable.
    """

    kept: tuple[int, ...]
    table: Table
    width: int
    largest_table: int
    _steps: tuple[_Step, ...]
    _num_variables: int

    def assignment(self, kept_values: Sequence[int] | None = None) -> tuple[int, ...]:
        """A best value of every variable, given those of the kept ones (None: the best ones)."""
        if kept_values is None:
            best = np.unravel_index(int(np.argmin(self.table)), self.table.shape)
            kept_values = [int(value) for value in best]
        values = [0] * self._num_variables
        for variable, value in zip(self.kept, kept_values, strict=True):
            values[variable] = value
        for step in reversed(self._steps):
            values[step.variable] = int(step.choice[tuple(values[v] for v in step.scope)])
        return tuple(values)


class EliminationPlan:
    """What an elimination does with tables over these scopes, whatever their entries. Regions that
    differ in sizes alone share it.

    domains: number of values per variable, each at least 1. keep: variables that are not
    eliminated. order: of elimination, if at hand (min_fill_order depends on the scopes alone).
    """

    def __init__(
        self,
        domains: Sequence[int],
        scopes: Sequence[tuple[int, ...]],
        keep: Sequence[int] = (),
        order: Sequence[int] | None = None,
    ) -> None:
        if order is None:
            order = min_fill_order(domains, scopes, keep)
        self.domains, self.keep = domains, tuple(keep)
        # Sums are formed in the order of what a kept variable is one case of: the same numbers for
        # a case as alone, to the last bit.
        self._inner = [1 if v in keep else d for v, d in enumerate(domains)]
        live = dict(enumerate(scopes))
        of_variable: list[set[int]] = [set() for _ in domains]
        for k, scope in live.items():
            for v in scope:
                of_variable[v].add(k)
        self._steps: list[tuple[int, _Sum]] = []
        for v in order:
            used = sorted(of_variable[v])
            scope = tuple(sorted({u for k in used for u in live[k]} - {v}))
            self._steps.append((v, self._sum(used, live, (*scope, v))))
            for k in used:
                for u in live.pop(k):
                    of_variable[u].discard(k)
            new = len(scopes) + len(self._steps) - 1
            live[new] = scope
            for u in scope:
                of_variable[u].add(new)
        self._last = self._sum(sorted(live), live, self.keep)
        self.width = max(
            (sum(u not in keep for u in s.scope[:-1]) for _, s in self._steps), default=0
        )
        inner = self._inner
        sizes = [math.prod([inner[u] for u in s.scope]) for _, s in self._steps]
        self.largest_table = max(sizes, default=1)
        self.num_entries = sum(sizes)
        """Of all tables that are summed up, for one value of each kept variable."""

    def run(self, tables: Sequence[Table]) -> Elimination:
        """Eliminate. tables: over the scopes, in that order."""
        live: list[Table | None] = list(tables)
        steps: list[_Step] = []
        for v, summed in self._steps:
            total = summed.of(live)
            steps.append(_Step(v, summed.scope[:-1], np.asarray(total.argmin(axis=-1))))
            live.append(np.asarray(np.minimum.reduce(total, axis=-1)))
        table = self._last.of(live)
        return Elimination(
            self.keep, table, self.width, self.largest_table, tuple(steps), len(self.domains)
        )

    def _sum(
        self, used: Sequence[int], live: Mapping[int, tuple[int, ...]], scope: tuple[int, ...]
    ) -> "_Sum":
        # Small tables first: the running sum stays small until a large one is met.
        ordered = sorted(used, key=lambda k: math.prod([self._inner[v] for v in live[k]]))
        terms = tuple((k, *_spread(live[k], scope)) for k in ordered)
        return _Sum(scope, tuple([self.domains[v] for v in scope]), terms)


@dataclass(frozen=True, slots=True, eq=False)
class _Sum:
    """sum_j f_j as one table over `scope`, of `shape`. terms: per table its number, its dims in the
    order of the scope, and an index that spreads it over what it lacks; None where nothing is to be
    done."""

    scope: tuple[int, ...]
    shape: tuple[int, ...]
    terms: tuple[tuple[int, tuple[int, ...] | None, tuple[slice | None, ...] | None], ...]

    def of(self, live: list[Table | None]) -> Table:
        """The sum; the tables that it takes are let go."""
        total: Table | None = None
        for k, dims, index in self.terms:
            table = live[k]
            assert table is not None
            live[k] = None
            if dims is not None:
                table = table.transpose(dims)
            if index is not None:
                table = table[index]
            total = table if total is None else total + table
        if total is None:
            total = np.zeros((1,) * len(self.scope))
        return total if total.shape == self.shape else np.broadcast_to(total, self.shape)


def _spread(
    variables: tuple[int, ...], scope: tuple[int, ...]
) -> tuple[tuple[int, ...] | None, tuple[slice | None, ...] | None]:
    """How a table over `variables` gets a dim for every variable of `scope`, of one entry for those
    it lacks."""
    dims = tuple(sorted(range(len(variables)), key=lambda k: scope.index(variables[k])))
    index = tuple(slice(None) if v in variables else None for v in scope)
    return (
        None if dims == tuple(range(len(dims))) else dims,
        None if len(variables) == len(scope) else index,
    )


class EliminationPlans:
    """Known plans, by domains and scopes."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], EliminationPlan] = {}

    def of(
        self, domains: Sequence[int], scopes: Sequence[tuple[int, ...]], case: int | None = None
    ) -> EliminationPlan:
        """The plan for these tables. case: a variable that numbers cases and is not eliminated; the
        order is that of one case."""
        key = tuple(domains), tuple(scopes), case
        if key not in self._known:
            keep = () if case is None else (case,)
            alone = [tuple([v for v in scope if v != case]) for scope in scopes]
            order = min_fill_order(domains, alone, keep)
            self._known[key] = EliminationPlan(key[0], key[1], keep, order)
        return self._known[key]


def min_fill_order(
    domains: Sequence[int], scopes: Sequence[tuple[int, ...]], keep: Sequence[int] = ()
) -> list[int]:
    """Elimination order of the variables outside `keep`, by the rule of the module docstring."""
    neighbours: list[set[int]] = [set() for _ in domains]
    for scope in scopes:
        for v in scope:
            neighbours[v].update(scope)
    for v, around in enumerate(neighbours):
        around.discard(v)
    log_domain = [math.log(d) for d in domains]
    left = set(range(len(domains))) - set(keep)

    def score(v: int) -> tuple[int, float, int]:
        around = sorted(neighbours[v])
        fill = sum(b not in neighbours[a] for k, a in enumerate(around) for b in around[k + 1 :])
        return fill, round(sum(log_domain[u] for u in around), 9), v

    scores = {v: score(v) for v in left}
    order: list[int] = []
    while scores:
        v = min(scores.values())[2]
        order.append(v)
        del scores[v]
        around = neighbours[v]
        for u in around:
            neighbours[u] |= around
            neighbours[u] -= {u, v}
        # New edges among `around` change the fill of them and of whoever sees two of them.
        touched = set(around).union(*(neighbours[u] for u in around)) if around else set()
        for u in touched & scores.keys():
            scores[u] = score(u)
    return order
