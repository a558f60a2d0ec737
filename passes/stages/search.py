"""Stage boundaries, strategies, schedule and warm-up depth for the least true makespan.

Level three of the search. Input: a StageProblem and the schedules allowed; output: a PipelinePlan
with a certified gap. The schedule with the fewest microbatches in flight comes first. Each one is
skipped if what is proven of it is above the best plan known, else searched:

    one stage per device     bounds and exact stages in turn, until they meet      (boundaries.py)
    interleaved, v of them   local search, and a bound for all divisions at once
                                                                                       (virtual_stages.py)

Stages are solved only where a division asks for them: tens to hundreds instead of p L^2 / 2. What
remains between bound and plan is, for one stage per device, that D's pre and suf are minimised
apart, which fades as 1 / m; for interleaved schedules the time that the pipeline takes to fill. A
schedule of one stage per device is skipped, too, when the tables of one with fewer in flight
already bound it (bound_from).
"""

import math
from collections.abc import Sequence

import numpy as np

from meshfold.cost_models.pipeline.schedules import Schedule, counted_in_flight
from meshfold.errors import OptionError
from meshfold.passes.stages.answer import PipelinePlan
from meshfold.passes.stages.boundaries import BoundarySearch
from meshfold.passes.stages.bounds import bounds_of_any, tighten
from meshfold.passes.stages.problem import Moments, StageProblem
from meshfold.passes.stages.solved import StageSolver
from meshfold.passes.stages.tables import StageTables
from meshfold.passes.stages.virtual_stages import VirtualStageSearch

MAX_SOLVED = 2000
"""Exact stages per search; chains without repeats, where every division has its own, may need
more."""

MAX_BRANCHES = 600
"""Sets of divisions times devices that are bounded apart, per schedule, to close a gap that D
leaves."""


def search_faster_stages(
    problem: StageProblem,
    schedules: Sequence[Schedule],
    beat_s: float,
    *,
    tolerance: float | None = None,
    max_branches: int = MAX_BRANCHES,
) -> PipelinePlan | float:
    """The plan with the least step time found under any of the schedules that is faster than
    beat_s; where none is found, a lower bound in seconds on all plans, beat_s at most (infinite
    where nothing fits and beat_s is).

    tolerance: relative gap at which closing stops; None: 0.5 % at one microbatch per stage, less at
    more of them, as the bounds get tighter. max_branches: 0 leaves the
    gap that BoundarySearch.close leaves. Raises OptionError for schedules of other sizes.
    """
    search = StageSearch(problem, schedules, tolerance)
    search.close(beat_s)
    if max_branches:
        search.branch(beat_s, max_branches)
    return search.answer(beat_s)


class StageSearch:
    """The stages of one problem under some schedules, in two steps that share what they find out:
    `close` looks for plans and bounds, `branch` closes what is left between them.

    step_s: of the best plan found, infinite before there is one. Raises OptionError for schedules
    of other sizes.
    """

    def __init__(
        self, problem: StageProblem, schedules: Sequence[Schedule], tolerance: float | None = None
    ) -> None:
        _check(problem, schedules)
        if tolerance is None:
            tolerance = 0.005 * min(1.0, problem.num_devices / problem.num_microbatches)
        self.problem, self.tolerance = problem, tolerance
        self.step_s = math.inf
        self._solver = StageSolver(problem)
        self._waiting = _in_order(schedules)
        """Schedules that are not searched, for the bounds beside them."""

        self._pruned_s = [0.0] * len(self._waiting)
        self._coarse_s = 0.0
        self._searches: list[BoundarySearch | VirtualStageSearch] = []
        self._best: BoundarySearch | VirtualStageSearch | None = None

    def close(self, beat_s: float) -> None:
        """Searches every schedule that may have a plan faster than beat_s."""
        self._coarse_s = _coarse_bound_s(self.problem, self._solver, self._waiting, beat_s)
        if self._coarse_s >= beat_s:
            return
        tables = StageTables(self.problem, self._solver)
        left: list[tuple[Schedule, float]] = []
        for schedule in self._waiting:
            limit_s = min(beat_s, self.step_s)
            search, bound_s = _started(self.problem, schedule, tables, self._searches, limit_s)
            if bound_s * (1 + self.tolerance) >= limit_s:
                left.append((schedule, bound_s))
                continue
            self._searches.append(search)
            search.close(limit_s, self.tolerance)
            self._take(search)
        self._waiting = [schedule for schedule, _ in left]
        self._pruned_s = [bound_s for _, bound_s in left]

    def branch(self, beat_s: float, max_branches: int) -> None:
        """Splits what is open, up to max_branches sets of divisions times devices per schedule."""
        for search in sorted(self._searches, key=lambda s: s.bound_s):
            if isinstance(search, BoundarySearch):
                search.branch(min(beat_s, self.step_s), self.tolerance, max_branches)
            self._take(search)

    def answer(self, beat_s: float) -> PipelinePlan | float:
        """The best plan where it is faster than beat_s, else the bound."""
        if self._best is None or self.step_s >= beat_s:
            return min(beat_s, self.bound_s)
        return self._best.plan(self.bound_s, any(search.capped for search in self._searches))

    @property
    def bound_s(self) -> float:
        """No plan is faster."""
        open_s = [search.bound_s for search in self._searches]
        return min(self.step_s, max(self._coarse_s, min([*self._pruned_s, *open_s])))

    def _take(self, search: BoundarySearch | VirtualStageSearch) -> None:
        if search.step_s < self.step_s:
            self._best, self.step_s = search, search.step_s


def _coarse_bound_s(
    problem: StageProblem, solver: StageSolver, schedules: Sequence[Schedule], limit_s: float
) -> float:
    """A bound on all schedules at once from coarse tables, limit_s at most; 0 where nothing is
    known of one of them."""
    if any(schedule.num_virtual_stages > 1 for schedule in schedules) or np.isinf(limit_s):
        return 0.0
    tables = StageTables(problem, solver, is_coarse=True)
    kinds = list(zip(_least_in_flight(schedules), problem.memory_bytes.tolist(), strict=True))
    most_s = limit_s / problem.num_microbatches
    beyond = [tables.beyond_s(kind, None if i else 0) for i, kind in enumerate(kinds)]
    beyond_s = problem.num_microbatches * min(beyond)
    if beyond_s < limit_s and tables.width < problem.num_layers:
        return 0.0
    arcs = [tables.arcs(kind, i, most_s) for i, kind in enumerate(kinds)]
    bounds = bounds_of_any(problem, schedules)
    return tighten(bounds, arcs, problem.hop_s, limit_s).bound_s


def _least_in_flight(schedules: Sequence[Schedule]) -> list[Moments]:
    """By device, one moment that every one of the schedules has no fewer in flight at."""
    # Where one does not split the backward, zip leaves out what others have between B and W.
    each = [[moments[-1] for moments in counted_in_flight(s)] for s in schedules]
    return [
        (tuple(map(min, zip(*of_device, strict=False))),) for of_device in zip(*each, strict=True)
    ]


def _started(
    problem: StageProblem,
    schedule: Schedule,
    tables: StageTables,
    searches: Sequence[BoundarySearch | VirtualStageSearch],
    limit_s: float,
) -> tuple[BoundarySearch | VirtualStageSearch, float]:
    """The search of a schedule and a bound on it before it has done anything."""
    if schedule.num_virtual_stages > 1:
        interleaved = VirtualStageSearch(problem, schedule)
        return interleaved, interleaved.bound_s
    search = BoundarySearch(problem, schedule, tables, MAX_SOLVED)
    earlier = [s for s in reversed(searches) if isinstance(s, BoundarySearch)]
    return search, next((b for o in earlier if (b := search.bound_from(o, limit_s))), 0.0)


def _in_order(schedules: Sequence[Schedule]) -> list[Schedule]:
    """One stage per device with the fewest microbatches in flight; then, as they are often
    faster by much, those of several; then the rest."""
    ordered = sorted(schedules, key=lambda s: (s.num_virtual_stages, sum(s.in_flight), str(s)))
    single = [s for s in ordered if s.num_virtual_stages == 1]
    return [*single[:1], *(s for s in ordered if s.num_virtual_stages > 1), *single[1:]]


def _check(problem: StageProblem, schedules: Sequence[Schedule]) -> None:
    if not schedules:
        raise OptionError("the stage search needs at least one schedule")
    for schedule in schedules:
        sizes = (schedule.num_devices, schedule.num_microbatches)
        if sizes != (problem.num_devices, problem.num_microbatches):
            raise OptionError(
                f"{schedule} does not fit {problem.num_devices} devices and "
                f"{problem.num_microbatches} microbatches"
            )
        if schedule.num_stages > problem.num_layers:
            raise OptionError(f"{schedule} has more stages than {problem.num_layers} layers")
