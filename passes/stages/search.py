"""Stage boundaries, strategies, schedule and warm-up depth for the least true makespan.

Level three of the search. Input: a StageProblem and the schedules allowed; output: a PipelinePlan
with a certified gap. The schedule that holds the fewest microbatches comes first. Each one is
skipped if what is proven of it is above the best plan known, else searched:

    one stage per device     bounds and exact stages in turn, until they meet      (stage_cuts)
    interleaved, v of them   local search, and a bound for all cuts at once        (stage_chunks)

Stages are solved only where a cut asks for them: tens to hundreds instead of p L^2 / 2. What stays
between bound and plan is, for one stage per device, that D's pre and suf are minimised apart, which
fades as 1 / m; for interleaved schedules the time that the pipeline takes to fill. A schedule of
one stage per device is skipped, too, when the tables of one that holds fewer microbatches already
bound it (bound_from).
"""

from collections.abc import Sequence

import numpy as np

from meshfold.cost_models.pipeline.schedules import Schedule
from meshfold.errors import InfeasibleError, OptionError
from meshfold.passes.run.search import solve_runs
from meshfold.passes.stages.answer import PipelinePlan, StageSearchStats
from meshfold.passes.stages.boundaries import CutSearch
from meshfold.passes.stages.problem import StageProblem
from meshfold.passes.stages.relaxation import least_overrun
from meshfold.passes.stages.schedules import offered_schedules
from meshfold.passes.stages.solved import RunSolver, StageCells
from meshfold.passes.stages.tables import StageTables
from meshfold.passes.stages.virtual_stages import ChunkSearch

MAX_CELLS = 2000
"""Exact stages per search; chains without repeats, where every cut has its own, may need more."""

MAX_PARTS = 600
"""Sets of cuts times devices that are bounded apart, per schedule, to close a gap that D leaves."""


def default_schedules(problem: StageProblem) -> tuple[Schedule, ...]:
    """Those of stage_schedules that differ for this problem: a split backward is of use only where
    the time of weight gradients is known."""
    has_weights = any(run.layer.weight_s.any() for run in problem.runs)
    offered = offered_schedules(problem.num_devices, problem.num_microbatches, problem.num_layers)
    return tuple(
        s
        for s in offered
        if (has_weights or not s.splits_backward)
        and (problem.conversion_s is None or s.num_chunks == 1)
    )


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

    schedules: None: default_schedules. tolerance: relative gap at which
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
    searches: list[CutSearch | ChunkSearch] = []
    best: CutSearch | ChunkSearch | None = None
    limit_s = beat_s
    pruned_s: list[float] = []
    for schedule in _in_order(schedules):
        search, bound_s = _started(problem, schedule, tables, max_cells, searches, limit_s)
        if bound_s * (1 + tolerance) >= limit_s:
            pruned_s.append(bound_s)
            continue
        searches.append(search)
        search.close(limit_s, tolerance)
        if search.step_s < limit_s:
            best, limit_s = search, search.step_s
    for search in sorted(searches, key=lambda s: s.bound_s) if max_parts else ():
        if isinstance(search, CutSearch):
            search.branch(limit_s, tolerance, max_parts)
        if search.step_s < limit_s:
            best, limit_s = search, search.step_s
    lower_s = min([limit_s, *pruned_s, *(search.bound_s for search in searches)])
    if best is None:
        return lower_s
    in_chunks = [s.cells.num_solved for s in searches if isinstance(s, ChunkSearch)]
    stats = StageSearchStats(
        len(schedules),
        len(pruned_s),
        cells.num_solved + sum(in_chunks),
        sum(search.num_simulations for search in searches),
        any(search.capped for search in searches),
    )
    return best.plan(lower_s, stats)


def _started(
    problem: StageProblem,
    schedule: Schedule,
    tables: StageTables,
    max_cells: int,
    searches: Sequence[CutSearch | ChunkSearch],
    limit_s: float,
) -> tuple[CutSearch | ChunkSearch, float]:
    """The search of a schedule and a bound on it before it has done anything."""
    if schedule.num_chunks > 1:
        chunked = ChunkSearch(problem, schedule, tables.cells.solve_run)
        return chunked, chunked.bound_s
    search = CutSearch(problem, schedule, tables, max_cells)
    earlier = [s for s in reversed(searches) if isinstance(s, CutSearch)]
    return search, next((b for o in earlier if (b := search.bound_from(o, limit_s))), 0.0)


def _in_order(schedules: Sequence[Schedule]) -> list[Schedule]:
    """That of one stage per device with the fewest microbatches in flight; then, as they are often
    faster by much, those of several; then the rest."""
    ordered = sorted(schedules, key=lambda s: (s.num_chunks, sum(s.in_flight), str(s)))
    single = [s for s in ordered if s.num_chunks == 1]
    return [*single[:1], *(s for s in ordered if s.num_chunks > 1), *single[1:]]


def cut_step_s(problem: StageProblem, schedule: Schedule, cuts: Sequence[int]) -> float:
    """Step time of a given cut (first layer of each stage, and the number of layers) with the best
    strategies of every stage on its own; infinite where a stage does not fit."""
    cells = StageCells(problem, solve_runs)
    search = CutSearch(problem, schedule, StageTables(problem, cells), MAX_CELLS)
    search.try_cut(tuple(cuts))
    return search.step_s


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
        if schedule.num_chunks > 1 and problem.conversion_s is not None:
            raise OptionError(f"{schedule}: conversions between layouts need one stage per device")


def _infeasible(problem: StageProblem, schedules: Sequence[Schedule]) -> InfeasibleError:
    """Names the device that is over its budget in the cut that comes closest to fitting."""
    least = _in_order(schedules)[0]
    if least.num_chunks > 1:
        return InfeasibleError(
            f"found no cut of {problem.num_layers} layers into {least.num_stages} stages that fits "
            f"under {least}; pin another schedule, or give devices more memory",
            binding_constraint="memory of the devices",
            best_candidate=str(least),
        )
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
