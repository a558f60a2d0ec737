"""The best pipeline of one model: stages and strategies per layer on every choice of degrees.

    tree of degrees (tree.py), a bound for each
        -> lowest bound first, until it reaches the best plan found (best_first.best_first),
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
from dataclasses import dataclass

import numpy as np

from meshfold.cost_models.pipeline.schedules import ScheduleKind
from meshfold.ir.strategy import UniformStrategy
from meshfold.passes.pipeline.best_first import BestFirstResult, Solution, best_first
from meshfold.passes.pipeline.bounds import KERNELS, PEAK_RATE, kernels_bound_s, peak_rate_bounds_s
from meshfold.passes.pipeline.interleaved import InterleavedOutcome, search_interleaved
from meshfold.passes.pipeline.layers import StrategyCosts
from meshfold.passes.pipeline.problem import PipelineProblem, PipelineProblems
from meshfold.passes.pipeline.tree import PipelineTree
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
    search = _PipelineSearch(problems, tree, step_s, lower_bound_s)
    result = search.run()
    several = search.run_interleaved()
    searched = tuple(search.searched[i] for i in sorted(search.searched))
    best = result.solution.plan if result else None
    bound_s = result.lower_bound_s if result else np.inf
    if several.best is not None:
        best = search.found[several.best[0]]
        bound_s = min(bound_s, several.bound_s, best.step_s)
    pruned = search.pruned() if result else {}
    found = tuple(search.found[i] for i in sorted(search.found))
    num_left_out = search.num_left_out(several, best.step_s if best else step_s)
    return PipelineOutcome(best, bound_s, pruned, searched, found, num_left_out)


class _PipelineSearch:
    """Candidates in order of their bounds; the last one is the plan without a pipeline."""

    def __init__(
        self, problems: PipelineProblems, tree: PipelineTree, step_s: float, lower_bound_s: float
    ) -> None:
        self.problems = problems
        self.tree = tree
        self.degrees = tree.candidates
        self.without = Solution[PricedPipeline | None](step_s, lower_bound_s, None)
        self.incumbent_s = step_s
        self.found: dict[int, PricedPipeline] = {}
        self._problems: dict[int, PipelineProblem] = {}
        self._searches: dict[int, StageSearch] = {}
        self.tiers = dict.fromkeys(range(len(self.degrees)), PEAK_RATE)
        """The last bound that was asked for, by number of the candidate, until it is solved."""
        self.searched: dict[int, tuple[UniformStrategy, float, float | None]] = {}
        """(degrees, lower bound, step) by number of the candidate."""

    def pruned(self) -> dict[str, int]:
        """Strategies left out, by rule."""
        pruned: Counter[str] = Counter()
        for index, rule in self.tiers.items():
            pruned[rule] += self.tree.num_kinds(self.degrees[index])
        return dict(pruned)

    def run(self) -> BestFirstResult[PricedPipeline | None] | None:
        """The winner; None when nothing fits."""
        candidates = [_key(d) for d in self.degrees]
        bounds = peak_rate_bounds_s(self.problems, self.tree)
        if np.isfinite(self.incumbent_s):
            candidates.append((0,) * len(candidates[0]))
            bounds = np.append(bounds, self.without.lower_bound_s)
        refine = [self._kernels_s, self._memory_s, self._stages_s]
        return best_first(candidates, bounds, self._solve, refine=refine, tolerance=TOLERANCE)

    def run_interleaved(self) -> InterleavedOutcome:
        """Whether a schedule of several virtual stages is faster than all of them."""
        schedules = {i: self.tree.interleaved_of(self.degrees[i]) for i in self._problems}
        outcome = search_interleaved(self._problems, schedules, self.incumbent_s)
        if outcome.best is not None:
            index, plan = outcome.best
            self.found[index] = found = priced_pipeline(self._problems[index], plan)
            self.incumbent_s = found.step_s
            degrees, bound_s, _ = self.searched.get(index, (self.degrees[index], 0.0, None))
            self.searched[index] = degrees, min(bound_s, found.step_s), found.step_s
        return outcome

    def num_left_out(self, several: InterleavedOutcome, beat_s: float) -> int:
        """Schedules of several virtual stages that were not searched and that may be faster than
        beat_s: the bounds of their kernels are below it."""
        left_out = 0
        for index, degrees in enumerate(self.degrees):
            num_offered = len(self.tree.interleaved_of(degrees))
            kind = ScheduleKind.INTERLEAVED
            if num_offered and kernels_bound_s(self.problems, self.tree, degrees, kind) < beat_s:
                left_out += num_offered - several.tried.count(index)
        return left_out

    def _kernels_s(self, index: int) -> float:
        if index == len(self.degrees):
            return 0.0
        self.tiers[index] = KERNELS
        return kernels_bound_s(self.problems, self.tree, self.degrees[index])

    def _memory_s(self, index: int) -> float:
        if index == len(self.degrees):
            return 0.0
        self.tiers[index] = MEMORY
        problem = self._problem(index)
        kinds = {schedule.kind for schedule in self.tree.schedules_of(self.degrees[index])}
        return memory_bound_s(problem.chain, kinds) + problem.launch_s

    def _problem(self, index: int) -> PipelineProblem:
        if index not in self._problems:
            strategies = self.tree.strategies_of(self.degrees[index])
            self._problems[index] = self.problems.problem(strategies)
        return self._problems[index]

    def _stages_s(self, index: int) -> float:
        """Looks for a plan as well; after it the incumbent is the best of all."""
        if index == len(self.degrees):
            return 0.0
        self.tiers[index] = STAGES
        problem = self._problem(index)
        schedules = self.tree.schedules_of(self.degrees[index])
        search = self._searches[index] = StageSearch(problem.chain, schedules)
        search.close(self.incumbent_s - problem.launch_s)
        return self._taken(index)

    def _solve(self, index: int, limit_s: float) -> Solution[PricedPipeline | None] | float:
        if index == len(self.degrees):
            return self.without
        del self.tiers[index]
        problem, search = self._problem(index), self._searches.pop(index)
        search.branch(self.incumbent_s - problem.launch_s, MAX_BRANCHES)
        bound_s = self._taken(index, search)
        found = self.found.get(index)
        return bound_s if found is None else Solution(found.step_s, bound_s, found)

    def _taken(self, index: int, search: StageSearch | None = None) -> float:
        """Keeps what the search of one choice of degrees has found; the bound it proves."""
        search = search or self._searches[index]
        problem = self._problem(index)
        bound_s, beat_s = search.bound_s + problem.launch_s, self.incumbent_s - problem.launch_s
        plan = search.answer(beat_s)
        if isinstance(plan, PipelinePlan):
            self.found[index] = priced_pipeline(problem, plan)
            self.incumbent_s = min(self.incumbent_s, self.found[index].step_s)
        found = self.found.get(index)
        if found is not None:
            bound_s = min(bound_s, found.step_s)
        self.searched[index] = self.degrees[index], bound_s, found.step_s if found else None
        return bound_s


def _key(degrees: UniformStrategy) -> tuple[int, ...]:
    d = degrees
    return d.pp, *d.degrees, d.microbatches, int(d.sequence_parallel)


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
