"""Exact minimum of a sum of tables by (min,+) variable elimination.

Given variables x_0..x_{n-1}, x_i in {0..domains[i]-1}, and factors f_j, each a table over a few of
them, find for every value of the kept variables K

    T[x_K] = min over the other x of  sum_j f_j[x_scope(j)]                         (eliminate)

One variable after the other leaves. With F_v the factors that mention v and N(v) the other
variables in them, v leaves behind one new factor over N(v):

    g_v[x_N(v)] = min_{x_v} sum_{f in F_v} f[x_scope(f)]                            (_sum_tables)

and the minimising x_v is kept, so that an assignment is read back in reverse order
(Elimination.assignment). The order is greedy min-fill: the variable whose neighbours lack the
fewest edges among each other leaves first, ties to the smaller new table, then the smaller number;
kept variables never leave. (Dechter, Bucket elimination, 1999; Kjaerulff, Triangulation of graphs,
1990.) Time and memory are O(n * largest table), exponential only in the induced width, which is 2
or 3 on regions of real models. Same tables in, same assignment out: every tie goes to the lower
index. Entries may be +inf (forbidden), never nan.
"""

import math
from collections.abc import Sequence
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
    """kept: the variables that stayed; table: T over them, in that order.

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


def eliminate(
    domains: Sequence[int],
    factors: Sequence[Factor],
    keep: Sequence[int] = (),
    order: Sequence[int] | None = None,
) -> Elimination:
    """Eliminate every variable but those of `keep`.

    domains: number of values per variable, each at least 1. order: of elimination, if at hand
    (min_fill_order depends on the scopes alone, not on the entries).
    """
    for factor in factors:
        assert factor.table.shape == tuple(domains[v] for v in factor.variables)
    if order is None:
        order = min_fill_order(domains, [f.variables for f in factors], keep)
    live: dict[int, Factor] = dict(enumerate(factors))
    of_variable: list[set[int]] = [set() for _ in domains]
    for k, factor in live.items():
        for v in factor.variables:
            of_variable[v].add(k)
    steps: list[_Step] = []
    width = 0
    largest = 1
    # Sums are formed in the order of what a kept variable is one case of: the same numbers for a
    # case as alone, to the last bit.
    inner = [1 if v in keep else d for v, d in enumerate(domains)]
    for v in order:
        used = sorted(of_variable[v])
        scope = tuple(sorted({u for k in used for u in live[k].variables} - {v}))
        total = _sum_tables([live[k] for k in used], (*scope, v), domains, inner)
        choice = np.asarray(total.argmin(axis=-1))
        steps.append(_Step(v, scope, choice))
        width = max(width, sum(u not in keep for u in scope))
        largest = max(largest, math.prod(inner[u] for u in (*scope, v)))
        for k in used:
            for u in live.pop(k).variables:
                of_variable[u].discard(k)
        new = len(factors) + len(steps)
        live[new] = Factor(scope, np.asarray(np.minimum.reduce(total, axis=-1)))
        for u in scope:
            of_variable[u].add(new)
    table = _sum_tables([live[k] for k in sorted(live)], tuple(keep), domains, inner)
    return Elimination(tuple(keep), table, width, largest, tuple(steps), len(domains))


def _sum_tables(
    factors: Sequence[Factor],
    scope: tuple[int, ...],
    domains: Sequence[int],
    inner: Sequence[int],
) -> Table:
    """sum_j f_j as one table over `scope`: each table is transposed into the order of the scope
    and broadcast over what it lacks. inner: the domains by which small tables are told."""
    # Small tables first: the running sum stays small until a large one is met.
    total: Table | None = None
    for factor in sorted(factors, key=lambda f: math.prod([inner[v] for v in f.variables])):
        table = _spread(factor, scope)
        total = table if total is None else total + table
    if total is None:
        total = np.zeros((1,) * len(scope))
    full = tuple([domains[v] for v in scope])
    return total if total.shape == full else np.broadcast_to(total, full)


def _spread(factor: Factor, scope: tuple[int, ...]) -> Table:
    """The table with a dim for every variable of `scope`, of one entry for those it lacks."""
    at = [scope.index(v) for v in factor.variables]
    shape = [1] * len(scope)
    for k, size in zip(at, factor.table.shape, strict=True):
        shape[k] = size
    in_order = sorted(at)
    if at == in_order:
        return factor.table.reshape(shape)
    return factor.table.transpose([at.index(k) for k in in_order]).reshape(shape)


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
