"""The run level: the fastest strategies for a chain of runs under a memory budget, proven.

Stands between the costs of strategies and the stage search; needs no model and no torch, so it can
be fed any cost table. The problem and its answers are in passes/run/problem.py, bounds for many
budgets at once in passes/run/hull.py. `solve_runs` picks the method:

one layout                 order does not matter: layers are pooled by type and the counts found by
                           core enumeration (core.py)
few runs, many layouts     the layout walks in order of their bound (walks.py), each closed by
                           core enumeration, until a bound reaches the best plan
many different layers      label search (labels.py)

The first two do not depend on the number of layers. All are exact: gap is 0 unless the node cap was
hit. Times within 1e-12 of each other are equal; then the plan with the fewest distinct strategies,
the least memory and the first names wins among those looked at. The caller's order of strategies
changes nothing.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshfold.passes.run.chain import Chain, Relaxation, best_relaxation, close_conversions, prepare
from meshfold.passes.run.core import CoreResult, LayerGroup, close_core, is_below, relaxed_time_s
from meshfold.passes.run.hull import Hull, IntArray, lower_hull
from meshfold.passes.run.labels import search_labels
from meshfold.passes.run.problem import Block, NothingFaster, NothingFits, RunPlan, RunProblem
from meshfold.passes.run.walks import Walk, layout_walks

MAX_COUNTED = 12
"""Pooled layer types, or runs of a chain, up to which counts are enumerated. Chosen:
enumeration is exponential in them, label search is not."""

NODE_CAP = 500_000
"""Plans looked at before giving up the proof: a quarter of a second when pruned by dominance."""

LABEL_CAP = 500_000
"""Labels retained in all before giving up the proof: about a second."""


def solve_runs(
    problem: RunProblem, *, node_cap: int = NODE_CAP, incumbent_s: float = math.inf
) -> RunPlan | NothingFits | NothingFaster:
    """The fastest plan that fits, or the least memory any plan needs when none does. incumbent_s:
    of a plan that is there already; slower ones need not be found."""
    if problem.budget_bytes is not None and problem.least_bytes > problem.budget_bytes:
        return NothingFits(problem.least_bytes, problem.budget_bytes)
    chain = prepare(problem)
    if len(chain.conversion_s) == 1 and len(chain.tables) <= MAX_COUNTED:
        pooled = _solve_pooled(problem, chain, node_cap, incumbent_s)
        if isinstance(pooled, NothingFaster):
            return pooled
        found = pooled
    elif len(chain.conversion_s) > 1 and len(chain.runs) <= MAX_COUNTED:
        found = _WalkSolver(problem, chain, node_cap).solve()
    else:
        found = _solve_labels(problem, chain)
    return found.plan(problem)


@dataclass(frozen=True)
class _Found:
    """What a method returns: the plan as blocks and what is known about it."""

    blocks: tuple[Block, ...]
    dual_s: float
    first_s: float
    nodes: int
    capped: bool

    def plan(self, problem: RunProblem) -> RunPlan:
        """The plan with its gaps."""
        time_s, conversion_s, memory = price_blocks(problem, self.blocks)
        return RunPlan(
            self.blocks,
            time_s,
            conversion_s,
            memory,
            min(self.dual_s, time_s),
            _gap(max(self.first_s, time_s), self.dual_s),
            _gap(time_s, self.dual_s) if self.capped else 0.0,
            self.nodes,
            self.capped,
        )


def _gap(value_s: float, bound_s: float) -> float:
    if value_s <= bound_s:
        return 0.0
    return (value_s - bound_s) / bound_s if bound_s > 0 else math.inf


def price_blocks(problem: RunProblem, blocks: Sequence[Block]) -> tuple[float, float, int]:
    """Seconds with conversions, seconds of conversions alone, and bytes of a plan as emitted."""
    tables = [problem.runs[block.run].layer_type for block in blocks]
    layer_s = [
        block.count * float(table.time_s[block.strategy])
        for block, table in zip(blocks, tables, strict=True)
    ]
    conversions_s: list[float] = []
    if problem.conversion_s is not None:
        closed = close_conversions(problem.conversion_s)
        layouts = [
            0 if table.layouts is None else int(table.layouts[block.strategy])
            for block, table in zip(blocks, tables, strict=True)
        ]
        pairs = zip(layouts, layouts[1:], strict=False)
        conversions_s = [float(closed[left, right]) for left, right in pairs]
    memory = problem.fixed_bytes + sum(
        block.count * int(table.memory_bytes[block.strategy])
        for block, table in zip(blocks, tables, strict=True)
    )
    return math.fsum(layer_s + conversions_s), math.fsum(conversions_s), memory


def _solve_pooled(
    problem: RunProblem, chain: Chain, node_cap: int, incumbent_s: float
) -> _Found | NothingFaster:
    """One layout: the counts per layer type decide."""
    totals = [0] * len(chain.tables)
    for kind in chain.runs:
        table, count = chain.kinds[kind]
        totals[table] += count
    groups = [
        LayerGroup(
            total, table.time_s, table.memory_bytes, lower_hull(table.time_s, table.memory_bytes)
        )
        for table, total in zip(chain.tables, totals, strict=True)
    ]
    result = close_core(groups, chain.budget_bytes, node_cap=node_cap, incumbent_s=incumbent_s)
    if result.plan is None:
        return NothingFaster(result.dual_s if result.capped else incumbent_s)
    left = [column.copy() for column in result.plan.counts]
    counts = [_take(left[chain.kinds[kind][0]], chain.kinds[kind][1]) for kind in chain.runs]
    walk = tuple((0,) for _ in chain.runs)
    blocks = _blocks(problem, chain, walk, counts)
    return _Found(blocks, result.dual_s, result.first_s, result.nodes, result.capped)


def _take(left: IntArray, count: int) -> IntArray:
    """The next `count` layers of what is left per strategy, the first strategies first."""
    before = np.minimum(np.cumsum(left), count)
    taken = np.diff(before, prepend=0)
    left -= taken
    return taken


def _blocks(
    problem: RunProblem, chain: Chain, walk: Walk, counts: Sequence[IntArray]
) -> tuple[Block, ...]:
    """Counts per run and strategy in emission order: by the walk's layouts, then by name."""
    blocks = []
    for run, (layouts, column) in enumerate(zip(walk, counts, strict=True)):
        table, names = chain.table(run), problem.runs[run].layer_type.strategies
        for layout in layouts:
            for index in np.flatnonzero((table.layouts == layout) & (column > 0)).tolist():
                strategy = int(table.strategies[index])
                blocks.append(Block(run, strategy, names[strategy], int(column[index])))
    return tuple(blocks)


class _WalkSolver:
    """The best plan over layout walks, with what is shared between walks."""

    def __init__(self, problem: RunProblem, chain: Chain, node_cap: int) -> None:
        self.problem, self.chain, self.node_cap = problem, chain, node_cap
        self.relaxed: Relaxation = best_relaxation(chain)
        self.nodes, self.capped = 0, False
        self.best_s, self.first_s = math.inf, math.inf
        self.best: tuple[tuple[object, ...], tuple[Block, ...]] | None = None
        self._sides: dict[tuple[int, tuple[int, ...]], tuple[IntArray, Hull]] = {}

    def solve(self) -> _Found:
        """Closes walks, the lowest bound first, until the bound reaches the best plan.

        A walk is met twice: at the bound of `layout_walks`, and at the higher one of its own
        relaxation.
        """
        walks = layout_walks(self.chain, self.relaxed)
        next_s, next_walk = next(walks)
        relaxed: list[tuple[float, Walk]] = []
        while is_below(min(next_s, relaxed[0][0] if relaxed else math.inf), self.best_s):
            if self.best is not None and self.nodes >= self.node_cap:
                self.capped = True
                break
            self.nodes += 1
            if relaxed and relaxed[0][0] <= next_s:
                self._close(heapq.heappop(relaxed)[1])
                continue
            conversions_s = self._conversions_s(next_walk)
            groups = self._groups(next_walk)
            bound_s = relaxed_time_s(groups, self.chain.budget_bytes) + conversions_s
            if math.isfinite(bound_s):
                heapq.heappush(relaxed, (bound_s, next_walk))
            next_s, next_walk = next(walks, (math.inf, next_walk))
        assert self.best is not None, "the least memory fits, so some walk has a plan"
        return _Found(self.best[1], self.relaxed.dual_s, self.first_s, self.nodes, self.capped)

    def _groups(self, walk: Walk) -> list[LayerGroup]:
        """The core problem of one walk."""
        return [
            LayerGroup(self.chain.count(run), table.time_s[rows], table.memory_bytes[rows], hull)
            for run, (rows, hull) in enumerate(self._sides_of(walk))
            for table in (self.chain.table(run),)
        ]

    def _close(self, walk: Walk) -> None:
        """The best plan on one walk, if it can beat the best one found."""
        result = close_core(
            self._groups(walk),
            self.chain.budget_bytes,
            constant_s=self._conversions_s(walk),
            incumbent_s=self.best_s,
            node_cap=max(1, self.node_cap - self.nodes),
        )
        self.nodes += result.nodes
        self.capped |= result.capped
        self._compare(walk, [rows for rows, _ in self._sides_of(walk)], result)

    def _compare(self, walk: Walk, rows: Sequence[IntArray], result: CoreResult) -> None:
        """Keeps the result's plan if it is the best so far, in the order of ties."""
        if math.isinf(self.first_s):
            self.first_s = result.first_s
        if result.plan is None:
            return
        counts = []
        for run, (indices, column) in enumerate(zip(rows, result.plan.counts, strict=True)):
            full = np.zeros(len(self.chain.table(run).strategies), np.int64)
            full[indices] = column
            counts.append(full)
        blocks = _blocks(self.problem, self.chain, walk, counts)
        time_s, _, memory = price_blocks(self.problem, blocks)
        distinct = len({(block.run, block.strategy) for block in blocks})
        key = (distinct, memory, tuple((b.run, b.name, b.count) for b in blocks))
        better = self.best is None or is_below(time_s, self.best_s)
        if better or (self.best is not None and key < self.best[0]):
            self.best = (key, blocks)
        self.best_s = min(self.best_s, time_s)

    def _sides_of(self, walk: Walk) -> list[tuple[IntArray, Hull]]:
        return [self._side(run, tuple(sorted(seen))) for run, seen in enumerate(walk)]

    def _side(self, run: int, layouts: tuple[int, ...]) -> tuple[IntArray, Hull]:
        """Rows of a run's table in these layouts, and their hull."""
        key = (self.chain.kinds[self.chain.runs[run]][0], layouts)
        if key not in self._sides:
            table = self.chain.table(run)
            rows = np.flatnonzero(np.isin(table.layouts, layouts))
            self._sides[key] = (rows, lower_hull(table.time_s[rows], table.memory_bytes[rows]))
        return self._sides[key]

    def _conversions_s(self, walk: Walk) -> float:
        flat = [layout for layouts in walk for layout in layouts]
        pairs = zip(flat, flat[1:], strict=False)
        return math.fsum(float(self.chain.conversion_s[a, b]) for a, b in pairs)


def _solve_labels(problem: RunProblem, chain: Chain) -> _Found:
    """Many different layers: every layer is a run of its own."""
    owners = [run for run in range(len(chain.runs)) for _ in range(chain.count(run))]
    tables = [chain.kinds[chain.runs[run]][0] for run in owners]
    kinds = tuple((table, 1) for table in range(len(chain.tables)))
    unrolled = replace(chain, kinds=kinds, runs=tuple(tables))
    relaxed = best_relaxation(unrolled)
    result = search_labels(unrolled, relaxed, max(2, LABEL_CAP // len(owners)))
    blocks: list[Block] = []
    for run, table, pick in zip(owners, tables, result.picks, strict=True):
        strategy = int(chain.tables[table].strategies[pick])
        name = problem.runs[run].layer_type.strategies[strategy]
        if blocks and (blocks[-1].run, blocks[-1].strategy) == (run, strategy):
            blocks[-1] = replace(blocks[-1], count=blocks[-1].count + 1)
        else:
            blocks.append(Block(run, strategy, name, 1))
    return _Found(tuple(blocks), relaxed.dual_s, result.first_s, result.labels, result.capped)
