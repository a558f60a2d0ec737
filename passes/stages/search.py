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

from collections.abc import Sequence

from meshfold.cost_models.pipeline.schedules import Schedule
from meshfold.errors import OptionError
from meshfold.passes.stages.answer import PipelinePlan
from meshfold.passes.stages.boundaries import BoundarySearch
from meshfold.passes.stages.problem import StageProblem
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
    _check(problem, schedules)
    if tolerance is None:
        tolerance = 0.005 * min(1.0, problem.num_devices / problem.num_microbatches)
    tables = StageTables(problem, StageSolver(problem))
    searches: list[BoundarySearch | VirtualStageSearch] = []
    best: BoundarySearch | VirtualStageSearch | None = None
    limit_s = beat_s
    pruned_s: list[float] = []
    for schedule in _in_order(schedules):
        search, bound_s = _started(problem, schedule, tables, searches, limit_s)
        if bound_s * (1 + tolerance) >= limit_s:
            pruned_s.append(bound_s)
            continue
        searches.append(search)
        search.close(limit_s, tolerance)
        if search.step_s < limit_s:
            best, limit_s = search, search.step_s
    for search in sorted(searches, key=lambda s: s.bound_s) if max_branches else ():
        if isinstance(search, BoundarySearch):
            search.branch(limit_s, tolerance, max_branches)
        if search.step_s < limit_s:
            best, limit_s = search, search.step_s
    lower_s = min([limit_s, *pruned_s, *(search.bound_s for search in searches)])
    if best is None:
        return lower_s
    return best.plan(lower_s, any(search.capped for search in searches))


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
