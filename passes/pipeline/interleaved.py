"""Interleaved schedules beside the best pipeline of one stage per device.

With v virtual stages on each of p devices a pipeline fills in 1 / v of the time, but every device
holds more microbatches, and layers have to divide into v p parts. The bounds of these schedules are
too loose to rule all of them out, so that only the most promising ones are searched:

    estimate   all layers fluid under the memory (stages/memory_bound.py), times the bubble of even
               stages, (m + (p - 1) / v) / p, times what uneven parts add
    search     MOST_TRIED of those whose estimate is below the best plan, the lowest first

The others are left out: what rules some of them out is that their kernels alone, on all devices,
take longer than the best plan (bounds.py).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from meshfold.cost_models.pipeline.schedules import Schedule
from meshfold.passes.pipeline.problem import PipelineProblem
from meshfold.passes.stages.answer import PipelinePlan
from meshfold.passes.stages.memory_bound import fluid_step_s
from meshfold.passes.stages.problem import StageProblem
from meshfold.passes.stages.search import StageSearch

INTERLEAVED = "interleaved schedules"
"""The name of what is left out."""

MOST_TRIED = 3
"""Schedules that are searched."""

MOST_PASSES = 8192
"""Forwards of all stages and microbatches of a schedule that is searched, whose simulation is a
step for each of them."""


@dataclass(frozen=True, eq=False)
class InterleavedOutcome:
    """best: number of the candidate and its plan, None where none is faster. bound_s: of the
    schedules that were searched. tried: the numbers of their candidates."""

    best: tuple[int, PipelinePlan] | None
    bound_s: float
    tried: tuple[int, ...]


def search_interleaved(
    problems: Mapping[int, PipelineProblem],
    schedules: Mapping[int, Iterable[Schedule]],
    beat_s: float,
) -> InterleavedOutcome:
    """The best plan under schedules of several virtual stages that is faster than beat_s. problems,
    schedules: by number of the candidate."""
    offered = [(index, schedule) for index in sorted(schedules) for schedule in schedules[index]]
    ranked = sorted(_promising(problems, offered, beat_s), key=lambda entry: entry[:2])
    best, bound_s = None, float("inf")
    for _, number in ranked[:MOST_TRIED]:
        index, schedule = offered[number]
        launch_s = problems[index].launch_s
        search = StageSearch(problems[index].chain, [schedule])
        search.close(beat_s - launch_s)
        bound_s = min(bound_s, search.bound_s + launch_s)
        plan = search.answer(beat_s - launch_s)
        if isinstance(plan, PipelinePlan):
            best, beat_s = (index, plan), plan.step_s + launch_s
    return InterleavedOutcome(best, bound_s, tuple(offered[n][0] for _, n in ranked[:MOST_TRIED]))


def _promising(
    problems: Mapping[int, PipelineProblem], offered: list[tuple[int, Schedule]], beat_s: float
) -> Iterator[tuple[float, int]]:
    """(estimate, number) of the schedules that may be faster than beat_s."""
    for number, (index, schedule) in enumerate(offered):
        if schedule.num_stages * schedule.num_microbatches <= MOST_PASSES:
            estimate_s = estimated_step_s(problems[index].chain, schedule)
            if estimate_s + problems[index].launch_s < beat_s:
                yield estimate_s, number


def estimated_step_s(problem: StageProblem, schedule: Schedule) -> float:
    """What a step takes in even stages; infinite where layers do not fit. No bound."""
    p, v, m = schedule.num_devices, schedule.num_virtual_stages, schedule.num_microbatches
    in_flight = np.array([-(-n // v) for n in schedule.in_flight])
    longest = max(run.count for run in problem.runs)
    uneven = -(-longest // (p * v)) * p * v / longest if longest >= p * v else 1.0
    return fluid_step_s(problem, in_flight, uneven * (m + (p - 1) / v) / p)
