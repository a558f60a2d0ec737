"""Stage boundaries, strategies, schedule and warm-up depth for the least true makespan.

Level three of the search. Input: a StageProblem and the schedules allowed; output: a PipelinePlan
with a certified gap. For each schedule (_ScheduleSearch.close):

    1. bounds T_i[a, b] of every stage, one table per (in flight, budget)        (stage_tables)
    2. the least D over all cuts is the lower bound; a cut that meets it         (stage_bounds)
    3. solve the stages of that cut exactly and simulate it: a plan              (_try)
    4. move single layers between stages, judged by D, then simulated            (stage_climb)
    5. exact times have replaced their bounds, and stages no better plan has are dropped: repeat
       from 2 until bound and plan meet, or 2 has no new cut
    6. then bound the halves of the cuts apart, again and again                  (branch)

Stages are solved only where a cut asks for them: tens to hundreds instead of p L^2 / 2. What stays
between bound and plan is that D's pre and suf are minimised apart, which fades as 1 / m. A schedule
is skipped when the tables of one that holds fewer microbatches already bound it (bound_from).
"""

import heapq
from collections.abc import Sequence

import numpy as np

from meshfold.cost_models.pipeline import StageTimes, device_ends_s
from meshfold.cost_models.schedules import Schedule
from meshfold.errors import InfeasibleError, OptionError
from meshfold.passes.run_dual import FloatArray
from meshfold.passes.run_search import solve_runs
from meshfold.passes.stage_bounds import Arcs, Bound, device_terms, split, tighten
from meshfold.passes.stage_cells import Cell, RunSolver, StageCells
from meshfold.passes.stage_climb import judge_s, neighbours
from meshfold.passes.stage_paths import cut_bound_s
from meshfold.passes.stage_plan import PipelinePlan, Stage, StageSearchStats
from meshfold.passes.stage_problem import StageProblem
from meshfold.passes.stage_relax import least_overrun
from meshfold.passes.stage_schedules import offered_schedules
from meshfold.passes.stage_tables import StageTables

MAX_CELLS = 2000
"""Exact stages per search; chains without repeats, where every cut has its own, may need more."""

MAX_PARTS = 600
"""Sets of cuts times devices that are bounded apart, per schedule, to close a gap that D leaves."""

MAX_SETTLED_PASSES = 30_000
"""Passes simulated one by one, per schedule, to bound single cuts by their critical paths."""

SYNC_WEIGHTS = (0.0, 0.5, 2.0)
"""Other weights of sync_s tried on each stage of a cut, 1 being that of a stage on its own."""

NUM_FINALISTS = 3
"""Neighbours of a cut that are solved and simulated before it counts as the best around."""


def default_schedules(problem: StageProblem) -> tuple[Schedule, ...]:
    """Those of stage_schedules that differ for this problem: a split backward is of use only where
    the time of weight gradients is known."""
    has_weights = any(run.layer.weight_s.any() for run in problem.runs)
    offered = offered_schedules(problem.num_devices, problem.num_microbatches, problem.num_layers)
    return tuple(s for s in offered if has_weights or not s.splits_backward)


def default_tolerance(problem: StageProblem) -> float:
    """Relative gap worth closing: 0.5 % at one microbatch per stage, less at more of them, as the
    bounds get tighter."""
    return 0.005 * min(1.0, problem.num_devices / problem.num_microbatches)


def search_stages(
    problem: StageProblem,
    schedules: Sequence[Schedule] | None = None,
    *,
    tolerance: float | None = None,
    solve_run: RunSolver = solve_runs,
    max_cells: int = MAX_CELLS,
) -> PipelinePlan:
    """The plan with the least step time found under any of the schedules, with its proof.

    schedules: with one chunk per device; None: default_schedules. tolerance: relative gap at which
    closing stops; None: default_tolerance. Raises InfeasibleError when no cut fits, OptionError for
    schedules of other sizes than the problem's.
    """
    if schedules is None:
        schedules = default_schedules(problem)
    found = search_faster_stages(
        problem, schedules, np.inf, tolerance=tolerance, solve_run=solve_run, max_cells=max_cells
    )
    if not isinstance(found, PipelinePlan):
        raise _infeasible(problem, schedules)
    return found


def search_faster_stages(
    problem: StageProblem,
    schedules: Sequence[Schedule],
    beat_s: float,
    *,
    tolerance: float | None = None,
    solve_run: RunSolver = solve_runs,
    max_cells: int = MAX_CELLS,
    max_parts: int = MAX_PARTS,
) -> PipelinePlan | float:
    """As search_stages, for plans faster than beat_s; where none is found, a lower bound in seconds
    on all plans, beat_s at most (infinite where nothing fits and beat_s is). max_parts: of cuts
    that are bounded apart, 0: the gap is left as it is before."""
    _check(problem, schedules)
    if tolerance is None:
        tolerance = default_tolerance(problem)
    cells = StageCells(problem, solve_run)
    tables = StageTables(problem, cells)
    searches: list[_ScheduleSearch] = []
    best: _ScheduleSearch | None = None
    limit_s = beat_s
    pruned_s: list[float] = []
    for schedule in sorted(schedules, key=lambda s: (sum(s.in_flight), str(s))):
        search = _ScheduleSearch(problem, schedule, tables, max_cells)
        bound_s = next((b for o in reversed(searches) if (b := search.bound_from(o, limit_s))), 0.0)
        if bound_s * (1 + tolerance) >= limit_s:
            pruned_s.append(bound_s)
            continue
        searches.append(search)
        search.close(limit_s, tolerance)
        if search.step_s < limit_s:
            best, limit_s = search, search.step_s
    for search in sorted(searches, key=lambda s: s.bound_s) if max_parts else ():
        search.branch(limit_s, tolerance, max_parts)
        if search.step_s < limit_s:
            best, limit_s = search, search.step_s
    lower_s = min([limit_s, *pruned_s, *(search.bound_s for search in searches)])
    if best is None:
        return lower_s
    stats = StageSearchStats(
        len(schedules),
        len(pruned_s),
        cells.num_solved,
        sum(search.num_simulations for search in searches),
        any(search.capped for search in searches),
    )
    return best.plan(lower_s, stats)


def cut_step_s(problem: StageProblem, schedule: Schedule, cuts: Sequence[int]) -> float:
    """Step time of a given cut (first layer of each stage, and the number of layers) with the best
    strategies of every stage on its own; infinite where a stage does not fit."""
    cells = StageCells(problem, solve_runs)
    search = _ScheduleSearch(problem, schedule, StageTables(problem, cells), MAX_CELLS)
    search._try(tuple(cuts))
    return search.step_s


def _check(problem: StageProblem, schedules: Sequence[Schedule]) -> None:
    if not schedules:
        raise OptionError("the stage search needs at least one schedule")
    for schedule in schedules:
        sizes = (schedule.num_devices, schedule.num_microbatches, schedule.num_chunks)
        if sizes != (problem.num_devices, problem.num_microbatches, 1):
            raise OptionError(
                f"{schedule} does not fit {problem.num_devices} devices, "
                f"{problem.num_microbatches} microbatches and one chunk per device"
            )


def _infeasible(problem: StageProblem, schedules: Sequence[Schedule]) -> InfeasibleError:
    """Names the device that is over its budget in the cut that comes closest to fitting."""
    least = min(schedules, key=lambda s: (sum(s.in_flight), str(s)))
    device, need, (first, end) = least_overrun(problem, least.in_flight)
    available = int(problem.memory_bytes[device])
    missing = max(need - available, 1)
    return InfeasibleError(
        f"no cut of {problem.num_layers} layers into {problem.num_devices} stages fits: under "
        f"{least} device {device} needs at least {missing} bytes more than its {available} for "
        f"layers {first} to {end - 1} with {least.in_flight[device]} microbatches in flight",
        binding_constraint=f"memory of device {device}",
        best_candidate=str(least),
        required_bytes=available + missing,
        available_bytes=available,
    )


class _ScheduleSearch:
    """The best plan under one schedule, and what is proven about it.

    bound_s: no plan under the schedule is faster. step_s: of the best plan, infinite before there
    is one; first_step_s: of the first.
    """

    def __init__(
        self, problem: StageProblem, schedule: Schedule, tables: StageTables, max_cells: int
    ) -> None:
        self.problem, self.schedule, self.tables = problem, schedule, tables
        self.step_s = self.first_step_s = float("inf")
        self.bound_s = 0.0
        self.num_simulations = 0
        self.capped = False
        self._terms = device_terms(problem, schedule)
        self._kinds = list(zip(schedule.in_flight, problem.memory_bytes.tolist(), strict=True))
        self._max_cells = max_cells
        self._left: Bound | None = None
        self._settled_passes = 0
        self._seen: dict[tuple[int, ...], float] = {}
        self._cuts: tuple[int, ...] = ()
        self._cells: list[Cell] = []

    def bound_from(self, other: "_ScheduleSearch", limit_s: float) -> float:
        """A bound on this schedule from the tables of another that holds no more microbatches on
        any device: its stages are never slower. 0 where that does not hold."""
        pairs = zip(other.schedule.in_flight, self.schedule.in_flight, strict=True)
        if any(theirs > ours for theirs, ours in pairs):
            return 0.0
        found = tighten(self._terms, other._all_arcs(limit_s), self.problem.hop_s, limit_s)
        return min(found.bound_s, other._beyond_s())

    def close(self, limit_s: float, tolerance: float) -> None:
        """Searches for plans faster than limit_s and raises the bound, as far as both go."""
        arcs = self._all_arcs(limit_s)
        found = tighten(self._terms, arcs, self.problem.hop_s, limit_s)
        while found.cuts is not None and found.cuts not in self._seen:
            self._try(found.cuts)
            self._climb()
            limit = min(limit_s, self.step_s)
            if limit > self._beyond_s() and self.tables.width < self.problem.num_layers:
                self.tables.widen()
                arcs = self._all_arcs(limit)
            found = self._tightened(arcs, limit)
            arcs = found.arcs
            self.bound_s = max(self.bound_s, min(found.bound_s, limit, self._beyond_s()))
            self.capped = self.tables.cells.num_solved >= self._max_cells
            if self.capped or limit <= self.bound_s * (1 + tolerance):
                return
        if found.cuts is None:
            self.bound_s = max(self.bound_s, min(limit_s, self.step_s, self._beyond_s()))
        else:
            self._left = found

    def branch(self, limit_s: float, tolerance: float, max_parts: int) -> None:
        """Splits the cuts left by where the widest open cut may lie, the part with the lowest bound
        first: inside a part the sums before and after a stage agree better with each other."""
        front = [] if self._left is None else [(self._left.bound_s, 0, self._left)]
        settled_s = np.inf
        for number in range(1, max_parts // self.problem.num_devices + 2):
            limit = min(limit_s, self.step_s)
            if not front or limit <= front[0][0] * (1 + tolerance):
                break
            bound_s, _, part = heapq.heappop(front)
            if part.cuts is not None and part.cuts not in self._seen:
                self._try(part.cuts)
                self._climb()
            sides = split(part.arcs)
            if not sides:
                settled_s = min(settled_s, max(bound_s, self._settle(part.cuts)))
            for side, arcs in enumerate(sides):
                found = self._tightened(arcs, min(limit_s, self.step_s))
                if found.cuts is not None:
                    entry = (max(bound_s, found.bound_s), 2 * number + side, found)
                    heapq.heappush(front, entry)
        left_s = front[0][0] if front else np.inf
        proven_s = min(left_s, settled_s, limit_s, self.step_s, self._beyond_s())
        self.bound_s = max(self.bound_s, proven_s)

    def _settle(self, cuts: tuple[int, ...] | None) -> float:
        """A bound on all strategies of one cut, 0 when there were enough of them."""
        num_passes = 2 * self.problem.num_devices * self.problem.num_microbatches
        if cuts is None or self._settled_passes + num_passes > MAX_SETTLED_PASSES:
            return 0.0
        self._settled_passes += num_passes
        cells = [
            self.tables.solve(kind, first, end)
            for kind, first, end in zip(self._kinds, cuts, cuts[1:], strict=False)
        ]
        found = [cell for cell in cells if cell is not None]
        if len(found) < len(cells):
            return np.inf
        return cut_bound_s(self.problem, self.schedule, cuts, found)

    def _tightened(self, arcs: Sequence[Arcs], limit_s: float) -> Bound:
        """The bound along the arcs with all that exact stages have shown."""
        priced = [
            self.tables.priced(kind, part.start, part.end)
            for kind, part in zip(self._kinds, arcs, strict=True)
        ]
        return tighten(self._terms, priced, self.problem.hop_s, limit_s)

    def plan(self, lower_s: float, stats: StageSearchStats) -> PipelinePlan:
        """The best plan found."""
        stages = tuple(
            Stage(
                first,
                end,
                cell.blocks,
                cell.forward_s,
                cell.backward_s,
                cell.weight_s,
                cell.sync_s,
                in_flight,
                cell.memory_bytes,
            )
            for first, end, cell, in_flight in zip(
                self._cuts, self._cuts[1:], self._cells, self.schedule.in_flight, strict=False
            )
        )
        return PipelinePlan(
            self.problem.num_layers,
            self.schedule,
            stages,
            tuple(self.problem.memory_bytes.tolist()),
            self.step_s,
            self.first_step_s,
            lower_s,
            stats,
        )

    def _all_arcs(self, limit_s: float) -> tuple[Arcs, ...]:
        """Every stage each device may get in a plan faster than limit_s."""
        most_s = limit_s / self.problem.num_microbatches
        return tuple(self.tables.arcs(kind, i, most_s) for i, kind in enumerate(self._kinds))

    def _beyond_s(self) -> float:
        """No plan with a stage of more layers than the tables hold is faster."""
        bounds = [
            self.tables.beyond_s(kind, None if i else 0) for i, kind in enumerate(self._kinds)
        ]
        return self.problem.num_microbatches * min(bounds)

    def _try(self, cuts: tuple[int, ...]) -> bool:
        """Solves and simulates a cut; whether it is the best so far."""
        cells = [
            self.tables.solve(kind, first, end)
            for kind, first, end in zip(self._kinds, cuts, cuts[1:], strict=False)
        ]
        found = [cell for cell in cells if cell is not None]
        self._seen[cuts] = float("inf")
        if len(found) < len(cells):
            return False
        found, step_s = self._with_sync_exposed(cuts, found)
        self._seen[cuts] = step_s
        if not self._cells:
            self.first_step_s = step_s
        if step_s >= self.step_s:
            return False
        self.step_s, self._cuts, self._cells = step_s, cuts, found
        return True

    def _with_sync_exposed(
        self, cuts: tuple[int, ...], cells: list[Cell]
    ) -> tuple[list[Cell], float]:
        """The cells, each replaced by one that weighs sync_s otherwise where that is faster, and
        the step: how much of a stage's sync_s is exposed shows only in the whole pipeline."""
        hop_s = self.problem.hop_s[list(cuts[1:-1])]
        step_s = step_time_s(self.schedule, cells, hop_s)
        self.num_simulations += 1
        if not self.tables.has_sync:
            return cells, step_s
        for i in range(len(cells)):
            for weight in SYNC_WEIGHTS:
                other = self.tables.cells.solve(cuts[i], cuts[i + 1], *self._kinds[i], weight)
                if other is None or other == cells[i]:
                    continue
                changed = [*cells[:i], other, *cells[i + 1 :]]
                changed_s = step_time_s(self.schedule, changed, hop_s)
                self.num_simulations += 1
                if changed_s < step_s:
                    cells, step_s = changed, changed_s
        return cells, step_s

    def _climb(self) -> None:
        """Follows the best neighbour as long as one of the finalists is an improvement."""
        improved = bool(self._cells) and self.schedule.num_devices > 1
        while improved:
            around = neighbours(self._cuts)
            total_s = sum(cell.forward_s + cell.backward_s for cell in self._cells)
            forward_s = sum(cell.forward_s for cell in self._cells)
            share = forward_s / total_s if total_s else 0.5
            tables = [self.tables.table(kind) for kind in self._kinds]
            judged = judge_s(around, tables, self._terms, share, self.problem.hop_s)
            order = np.argsort(judged, kind="stable")
            order = order[judged[order] < self.step_s]
            finalists = [tuple(around[at].tolist()) for at in order[: 4 * NUM_FINALISTS]]
            fresh = [cuts for cuts in finalists if cuts not in self._seen][:NUM_FINALISTS]
            improved = any(self._try(cuts) for cuts in fresh)


def step_time_s(schedule: Schedule, cells: Sequence[Cell], hop_s: FloatArray) -> float:
    """Simulated seconds of a step: every device's sync_s follows its last pass. hop_s: per cut."""
    times = StageTimes.build(
        [cell.forward_s for cell in cells],
        [cell.backward_s for cell in cells],
        weight_s=[cell.weight_s for cell in cells],
        hop_s=hop_s,
    )
    ends = device_ends_s(schedule, times)
    return float((ends + np.array([cell.sync_s for cell in cells])).max())
