"""A run problem prepared for the search, and its relaxation with conversions.

`prepare` puts strategies in the order of their names (so that the caller's order cannot matter),
drops those that another of the same layout beats in both time and memory, closes the conversions
under composition (Floyd and Warshall: a chain of conversions is a conversion) and merges layouts
that convert into each other for nothing.

Then some best plan keeps, inside every run, the layers of one layout together: moving a later block
of a layout next to its first one changes no layer and, by the triangle inequality, adds no
conversion. So at a price p per byte, with u_l the least  time + p * memory  in layout l, the best
segment of a run of n layers that enters in l and leaves in x visits at most one layout b between:

    E[l, x] = min_b  (n - others) u_b + sum of u over the others in {l, x} + R[l, b] + R[b, x]
    A_r[x]  = min_y  R[x, y] + H_{r+1}[y],       H_r[l] = min_x  E_r[l, x] + A_r[x]   (price_walk)

and min_l H_0[l] - p * budget bounds every plan from below. It is concave in p;
`best_relaxation` climbs to its maximum by intersecting the lines of the last plan that fits and
the last that does not.
"""

from dataclasses import dataclass

import numpy as np

from meshfold.passes.run.hull import FloatArray, IntArray, lower_hull, sum_hulls, undominated
from meshfold.passes.run.problem import LayerType, RunProblem

RELATIVE_ROUNDING = 1e-13
MAX_PRICES = 200


@dataclass(frozen=True, eq=False)
class ChainTable:
    """The useful strategies of a layer type, in the order of their names.

    strategies: their indices in the layer type; layouts: indices of classes of layouts.
    """

    strategies: IntArray
    time_s: FloatArray
    memory_bytes: IntArray
    layouts: IntArray


@dataclass(frozen=True, eq=False)
class Chain:
    """A run problem in canonical form."""

    tables: tuple[ChainTable, ...]
    """One per distinct layer type."""

    kinds: tuple[tuple[int, int], ...]
    """(table, count) of every distinct run."""

    runs: tuple[int, ...]
    """The kind of each run."""

    budget_bytes: int
    """Budget of the layers alone."""

    conversion_s: FloatArray
    """[from, to] between classes of layouts, closed under composition."""

    def table(self, run: int) -> ChainTable:
        """The table of run number `run`."""
        return self.tables[self.kinds[self.runs[run]][0]]

    def count(self, run: int) -> int:
        """The number of layers of run number `run`."""
        return self.kinds[self.runs[run]][1]


def close_conversions(conversion_s: FloatArray) -> FloatArray:
    """The conversions closed under composition, staying in a layout for nothing."""
    closed = np.array(conversion_s, float)
    np.fill_diagonal(closed, 0.0)
    for middle in range(len(closed)):
        closed = np.minimum(closed, closed[:, middle, None] + closed[middle])
    return closed


def prepare(problem: RunProblem) -> Chain:
    """The problem in canonical form; its least memory must fit the budget."""
    if problem.conversion_s is None:
        closed = np.zeros((1, 1))
    else:
        closed = close_conversions(problem.conversion_s)
    first = np.argmax((closed <= 0) & (closed.T <= 0), axis=1)
    firsts, classes = np.unique(first, return_inverse=True)
    types = list(dict.fromkeys(id(run.layer_type) for run in problem.runs))
    by_id = {id(run.layer_type): run.layer_type for run in problem.runs}
    every_layout = problem.conversion_s is not None
    tables = [_chain_table(by_id[i], classes if every_layout else None) for i in types]
    keys = [(types.index(id(run.layer_type)), run.count) for run in problem.runs]
    kinds = list(dict.fromkeys(keys))
    number = {kind: index for index, kind in enumerate(kinds)}
    return Chain(
        tuple(tables),
        tuple(kinds),
        tuple(number[key] for key in keys),
        _layer_budget(problem),
        closed[np.ix_(firsts, firsts)],
    )


def _layer_budget(problem: RunProblem) -> int:
    """Bytes for the layers; no more than all of them can use."""
    usable = sum(run.count * int(np.max(run.layer_type.memory_bytes)) for run in problem.runs)
    if problem.budget_bytes is None:
        return usable
    return min(usable, problem.budget_bytes - problem.fixed_bytes)


def _chain_table(layer_type: LayerType, classes: IntArray | None) -> ChainTable:
    order = np.asarray(
        sorted(range(len(layer_type.strategies)), key=layer_type.strategies.__getitem__)
    )
    times = np.asarray(layer_type.time_s, float)[order]
    memory = np.asarray(layer_type.memory_bytes, np.int64)[order]
    layouts = np.zeros(len(order), np.int64)
    if classes is not None and layer_type.layouts is not None:
        layouts = classes[np.asarray(layer_type.layouts)[order]]
    elif classes is not None:
        layouts = np.full(len(order), classes[0])
    useful = np.sort(
        np.concatenate(
            [
                members[undominated(times[members], memory[members])]
                for members in (np.flatnonzero(layouts == x) for x in np.unique(layouts))
            ]
        )
    )
    return ChainTable(order[useful], times[useful], memory[useful], layouts[useful])


@dataclass(frozen=True, eq=False)
class Relaxation:
    """The chain at one price of memory (seconds per byte).

    Times of layers are seconds plus price * memory.
    """

    price: float

    best_s: tuple[FloatArray, ...]
    """best_s[table][layout]: u_l of the module docstring; infinite where there is no strategy."""

    rest_s: FloatArray
    """rest_s[run][layout]: A of the module docstring."""

    dual_s: float
    """The lower bound."""

    time_s: float
    """Seconds of the plan that attains it."""

    memory_bytes: int
    """Memory of that plan."""


def best_relaxation(chain: Chain) -> Relaxation:
    """The relaxation at the price with the highest lower bound, up to rounding."""
    fast = price_walk(chain, 0.0)
    if fast.memory_bytes <= chain.budget_bytes:
        return fast
    price = max(_hull_price(chain), 1e-6 * fast.time_s / fast.memory_bytes, 1e-300)
    small = price_walk(chain, price)
    for _ in range(MAX_PRICES):
        if small.memory_bytes <= chain.budget_bytes:
            break
        fast, price = small, price * 4
        small = price_walk(chain, price)
    best = max(fast, small, key=lambda r: r.dual_s)
    for _ in range(MAX_PRICES):
        if small.memory_bytes >= fast.memory_bytes:
            break
        price = (small.time_s - fast.time_s) / (fast.memory_bytes - small.memory_bytes)
        line_s = small.time_s + price * (small.memory_bytes - chain.budget_bytes)
        found = price_walk(chain, price)
        best = max(best, found, key=lambda r: r.dual_s)
        if found.dual_s >= line_s - RELATIVE_ROUNDING * abs(line_s):
            break
        fits = found.memory_bytes <= chain.budget_bytes
        small, fast = (found, fast) if fits else (small, found)
    return best


def _hull_price(chain: Chain) -> float:
    """The price of memory when conversions are free."""
    hulls = [lower_hull(table.time_s, table.memory_bytes) for table in chain.tables]
    counts = [0] * len(hulls)
    for kind in chain.runs:
        table, count = chain.kinds[kind]
        counts[table] += count
    return sum_hulls(hulls, counts).price_at(chain.budget_bytes)


def price_walk(chain: Chain, price: float) -> Relaxation:
    """The relaxation at one price: the recurrence of the module docstring."""
    num_layouts, num_runs = len(chain.conversion_s), len(chain.runs)
    picks = [_best_by_layout(table, price, num_layouts) for table in chain.tables]
    segments = [
        _segments(picks[table][0], count, chain.conversion_s) for table, count in chain.kinds
    ]
    head_s = np.empty((num_runs, num_layouts))
    rest_s = np.zeros((num_runs, num_layouts))
    for run in reversed(range(num_runs)):
        if run + 1 < num_runs:
            rest_s[run] = (chain.conversion_s + head_s[run + 1]).min(axis=1)
        head_s[run] = (segments[chain.runs[run]] + rest_s[run]).min(axis=1)
    priced_s = float(head_s[0].min())
    memory = _walk_memory(chain, picks, segments, head_s, rest_s)
    return Relaxation(
        price,
        tuple(best_s for best_s, _ in picks),
        rest_s,
        priced_s - price * chain.budget_bytes,
        priced_s - price * memory,
        memory,
    )


def _best_by_layout(
    table: ChainTable, price: float, num_layouts: int
) -> tuple[FloatArray, IntArray]:
    """u_l (infinite where the type has no strategy in layout l) and its strategy's memory."""
    priced = table.time_s + price * table.memory_bytes
    best_s, memory = np.full(num_layouts, np.inf), np.zeros(num_layouts, np.int64)
    for index in np.lexsort((table.memory_bytes, priced))[::-1].tolist():
        best_s[table.layouts[index]] = priced[index]
        memory[table.layouts[index]] = table.memory_bytes[index]
    return best_s, memory


def _through(best_s: FloatArray, count: int, conversion_s: FloatArray) -> FloatArray:
    """Cost [l, b, x] of a run that enters in l, spends all layers it can in b and leaves in x."""
    size = len(best_s)
    same = np.eye(size, dtype=bool)
    enters, leaves = ~same[:, :, None], ~same[None, :, :]
    others = enters.astype(int) + leaves
    detour = same[:, None, :] & enters
    with np.errstate(invalid="ignore"):
        cost = np.where(others < count, (count - others) * best_s[None, :, None], np.inf)
        cost = cost + np.where(enters, best_s[:, None, None] + conversion_s[:, :, None], 0.0)
        cost = cost + np.where(leaves, best_s[None, None, :] + conversion_s[None, :, :], 0.0)
    return np.where(detour, np.inf, cost)


def _segments(best_s: FloatArray, count: int, conversion_s: FloatArray) -> FloatArray:
    """E of the module docstring."""
    if count == 1:
        return np.where(np.eye(len(best_s), dtype=bool), best_s, np.inf)
    return np.asarray(_through(best_s, count, conversion_s).min(axis=1))


def _walk_memory(
    chain: Chain,
    picks: list[tuple[FloatArray, IntArray]],
    segments: list[FloatArray],
    head_s: FloatArray,
    rest_s: FloatArray,
) -> int:
    """Bytes of the layers on the best walk."""
    layout, memory = int(np.argmin(head_s[0])), 0
    for run, kind in enumerate(chain.runs):
        table, count = chain.kinds[kind]
        best_s, bytes_by_layout = picks[table]
        leave = int(np.argmin(segments[kind][layout] + rest_s[run]))
        middle = layout
        if count > 1:
            middle = int(np.argmin(_through(best_s, count, chain.conversion_s)[layout, :, leave]))
        ends = {layout, leave} - {middle}
        memory += (count - len(ends)) * int(bytes_by_layout[middle])
        memory += sum(int(bytes_by_layout[end]) for end in ends)
        if run + 1 < len(chain.runs):
            layout = int(np.argmin(chain.conversion_s[leave] + head_s[run + 1]))
    return memory
