"""The best pipeline of one model: stages and strategies per layer on every choice of degrees.

    tree of degrees (tree.py), a bound for each
        -> lowest bound first, until it reaches the best plan found (one_pass/best_first.py),
           bounds in four tiers, each dearer and higher than the one before:

    peak rate, kernels   bounds.py
    memory               all layers fluid, under the memory of every device (stages/memory_bound.py)
    stages               the bound of the stage search before its gap is closed (stages/search.py)

The last one comes with a plan, so that the best one is known early; only degrees whose bound is
still below it are searched to the end. The plan without a pipeline takes part as a candidate that
is solved already: both kinds share one incumbent and one lower bound.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshfold.cost_models.pipeline.schedules import ScheduleKind
from meshfold.ir.strategy import UniformStrategy
from meshfold.passes.one_pass.best_first import (
    Solution,
    SolvedCandidate,
    TieredCandidate,
    best_first,
)
from meshfold.passes.pipeline.bounds import KERNELS, PEAK_RATE, kernels_bound_s, peak_rate_bounds_s
from meshfold.passes.pipeline.interleaved import InterleavedOutcome, search_interleaved
from meshfold.passes.pipeline.layers import StrategyCosts
from meshfold.passes.pipeline.problem import PipelineProblem, PipelineProblems
from meshfold.passes.pipeline.tree import PipelineTree, degrees_order
from meshfold.passes.stages.answer import PipelinePlan
from meshfold.passes.stages.memory_bound import memory_bound_s
from meshfold.passes.stages.search import StageSearch
from meshfold.passes.stages.solved import step_ends_s

MEMORY = "layers under the memory above the best plan"
STAGES = "stages above the best plan"

TOLERANCE = 1e-3
"""Degrees that cannot be better by more than this share are left out; the gap says so."""

MAX_BRANCHES = 120
"""Groups of stage boundaries bounded apart, per schedule, where a gap is closed."""


@dataclass(frozen=True, eq=False)
class PricedPipeline:
    """Stages with exact costs. layers: per layer of the chain its costs; device_s: per device of
    the pipeline from the start to the end of its last work; step_s: the latest of them."""

    problem: PipelineProblem
    plan: PipelinePlan
    layers: tuple[StrategyCosts, ...]
    device_s: tuple[float, ...]

    @property
    def step_s(self) -> float:
        return max(self.device_s)


@dataclass(frozen=True, eq=False)
class PipelineOutcome:
    """best: None where the plan without a pipeline is faster, or nothing fits. lower_bound_s: no
    plan of any candidate, the one without a pipeline included, with one stage per device is faster;
    where several won, none of the schedules that were tried either. searched: (degrees,
    bound, step) of the candidates whose stages were searched; step None where no plan is faster."""

    best: PricedPipeline | None
    lower_bound_s: float
    pruned: dict[str, int]
    searched: tuple[tuple[UniformStrategy, float, float | None], ...]
    found: tuple[PricedPipeline, ...] = ()
    """The plans of all candidates that have one, best among them."""

    num_interleaved: int = 0
    """Schedules of several virtual stages that no bound says anything about."""

    @property
    def num_priced(self) -> int:
        """Candidates for which a plan was found."""
        return sum(step_s is not None for _, _, step_s in self.searched)

    @property
    def num_infeasible(self) -> int:
        """Candidates that fit nowhere."""
        return sum(math.isinf(bound_s) for _, bound_s, _ in self.searched)


def search_pipelines(
    problems: PipelineProblems,
    tree: PipelineTree,
    *,
    step_s: float = np.inf,
    lower_bound_s: float = np.inf,
) -> PipelineOutcome:
    """The best pipeline that beats `step_s`, the step of the best plan without one, whose own lower
    bound is `lower_bound_s` (both infinite where there is none)."""
    race = _Race(problems, tree, step_s)
    bounds_s = peak_rate_bounds_s(problems, tree).tolist()
    pipelines = [_Pipeline(race, d, s) for d, s in zip(tree.candidates, bounds_s, strict=True)]
    without = [SolvedCandidate(lower_bound_s, step_s)] if np.isfinite(step_s) else []
    result = best_first([*pipelines, *without], tolerance=TOLERANCE)
    best = result.best.found if isinstance(result.best, _Pipeline) else None
    bound_s = result.lower_bound_s if result.best else np.inf
    pruned = Counter[str]()
    for pipeline in result.left if result.best else ():
        if isinstance(pipeline, _Pipeline):
            pruned[pipeline.rule] += tree.num_kinds(pipeline.degrees)
    several = _search_interleaved(race, pipelines)
    if several.best is not None:
        best, bound_s = pipelines[several.best[0]].found, min(bound_s, several.bound_s)
        bound_s = min(bound_s, race.incumbent_s)
    searched = tuple((p.degrees, *p.searched) for p in pipelines if p.searched)
    found = tuple(p.found for p in pipelines if p.found)
    num_left_out = _num_left_out(race, several)
    return PipelineOutcome(best, bound_s, dict(pruned), searched, found, num_left_out)


@dataclass
class _Race:
    """What all candidates share. incumbent_s: the step of the best plan known."""

    problems: PipelineProblems
    tree: PipelineTree
    incumbent_s: float


class _Pipeline(TieredCandidate):
    """One choice of degrees. found: its best plan; searched: bound and step of its stages, once
    they are searched, step None where no plan is faster than all before; rule: names the last bound
    that was asked for."""

    def __init__(self, race: _Race, degrees: UniformStrategy, bound_s: float) -> None:
        tiers = self._kernels_s, self._memory_s, self._stages_s
        super().__init__(degrees_order(degrees), bound_s, tiers)
        self.degrees, self.race = degrees, race
        self.rule = PEAK_RATE
        self.found: PricedPipeline | None = None
        self.searched: tuple[float, float | None] | None = None

    @cached_property
    def problem(self) -> PipelineProblem:
        return self.race.problems.problem(self.race.tree.strategies_of(self.degrees))

    def keep(self, plan: PipelinePlan) -> None:
        """Make a plan that is faster than all before the best one of this candidate."""
        self.found = priced_pipeline(self.problem, plan)
        self.race.incumbent_s = min(self.race.incumbent_s, self.found.step_s)

    def _kernels_s(self) -> float:
        self.rule = KERNELS
        return kernels_bound_s(self.race.problems, self.race.tree, self.degrees)

    def _memory_s(self) -> float:
        self.rule = MEMORY
        kinds = {schedule.kind for schedule in self.race.tree.schedules_of(self.degrees)}
        return memory_bound_s(self.problem.chain, kinds) + self.problem.launch_s

    def _stages_s(self) -> float:
        """Looks for a plan as well; after it the incumbent is the best of all."""
        self.rule = STAGES
        self._stages.close(self.race.incumbent_s - self.problem.launch_s)
        return self._taken()

    def solve(self, _: float, /) -> Solution:
        """Closes the gap of its stages, as far as that may beat the best plan known."""
        self._stages.branch(self.race.incumbent_s - self.problem.launch_s, MAX_BRANCHES)
        bound_s = self._taken()
        del self._stages
        return self.solution(bound_s, self.found.step_s if self.found else np.inf)

    @cached_property
    def _stages(self) -> StageSearch:
        return StageSearch(self.problem.chain, self.race.tree.schedules_of(self.degrees))

    def _taken(self) -> float:
        """Keeps what the search of stages has found; the bound it proves."""
        launch_s = self.problem.launch_s
        bound_s = self._stages.bound_s + launch_s
        plan = self._stages.answer(self.race.incumbent_s - launch_s)
        if isinstance(plan, PipelinePlan):
            self.keep(plan)
        step_s = self.found.step_s if self.found else None
        self.searched = min(bound_s, step_s or bound_s), step_s
        return self.searched[0]


def _search_interleaved(race: _Race, pipelines: Sequence[_Pipeline]) -> InterleavedOutcome:
    """Whether a schedule of several virtual stages is faster than all of them, on the degrees whose
    layers are priced."""
    priced = {k: p.problem for k, p in enumerate(pipelines) if p.rule in (MEMORY, STAGES)}
    schedules = {k: race.tree.interleaved_of(pipelines[k].degrees) for k in priced}
    outcome = search_interleaved(priced, schedules, race.incumbent_s)
    if outcome.best is not None:
        index, plan = outcome.best
        best = pipelines[index]
        best.keep(plan)
        bound_s, _ = best.searched or (0.0, None)
        best.searched = min(bound_s, race.incumbent_s), race.incumbent_s
    return outcome


def _num_left_out(race: _Race, several: InterleavedOutcome) -> int:
    """Schedules of several virtual stages that were not searched and that may be faster than the
    best plan: the bounds of their kernels are below it."""
    left_out, kind = 0, ScheduleKind.INTERLEAVED
    for index, degrees in enumerate(race.tree.candidates):
        num_offered = len(race.tree.interleaved_of(degrees))
        if num_offered:
            least_s = kernels_bound_s(race.problems, race.tree, degrees, kind)
            left_out += (num_offered - several.tried.count(index)) * (least_s < race.incumbent_s)
    return left_out


def priced_pipeline(problem: PipelineProblem, plan: PipelinePlan) -> PricedPipeline:
    """`plan` with the costs of its layers, and the launch of the optimizer that the chain leaves
    out."""
    layers: list[StrategyCosts] = []
    regions = [r for r, _, _ in problem.tables.folded.runs]
    for stage in plan.stages:
        for block in stage.blocks:
            layers += [problem.layer_costs[regions[block.run], block.strategy]] * block.count
    boundaries = [stage.first for stage in plan.stages[1:]]
    ends_s = step_ends_s(plan.schedule, plan.stages, problem.chain.hop_s[boundaries])
    device_s = tuple((ends_s + problem.launch_s).tolist())
    return PricedPipeline(problem, plan, tuple(layers), device_s)
