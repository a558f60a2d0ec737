"""The best pipeline of one model: stages and strategies per layer on every choice of degrees.

    tree of degrees (tree.py), a bound for each
        -> lowest bound first, until it reaches the best plan found (one_pass/best_first.py),
           bounds in four tiers, each dearer and higher than the one before:

    peak rate, kernels   bounds.py
    memory               all layers fluid, under the memory of every device (stages/memory_bound.py)
    stages               the bound of the stage search before its gap is closed (stages/search.py)

ZeRO inside a node (HSDP) is tried behind that, on the MOST_REPLICATED degrees whose bounds with
ZeRO over all of dp are the lowest: the kernels are theirs, and there are more states. Then come
schedules of several stages per device (interleaved.py).

The last one comes with a plan, so that the best one is known early; only degrees whose bound is
still below it are searched to the end. The plan without a pipeline takes part as a candidate that
is solved already: both kinds share one incumbent and one lower bound.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from meshfold.cost_models.pipeline.schedules import ScheduleKind
from meshfold.ir.strategy import UniformStrategy
from meshfold.passes.one_pass.best_first import (
    BestFirstResult,
    BoundQueue,
    Solution,
    SolvedCandidate,
    TieredCandidate,
    best_first,
)
from meshfold.passes.pipeline.bounds import (
    KERNELS,
    PEAK_RATE,
    KernelSums,
    kernel_sums,
    kernels_bound_s,
    peak_rate_bounds_s,
)
from meshfold.passes.pipeline.interleaved import (
    NUM_STARTS,
    InterleavedOutcome,
    search_interleaved,
)
from meshfold.passes.pipeline.layers import StrategyCosts
from meshfold.passes.pipeline.problem import PipelineProblem, PipelineProblems
from meshfold.passes.pipeline.tree import PipelineTree, degrees_order
from meshfold.passes.run.hull import IntArray
from meshfold.passes.stages.answer import PipelinePlan
from meshfold.passes.stages.memory_bound import memory_bound_s
from meshfold.passes.stages.search import StageSearch, search_faster_stages
from meshfold.passes.stages.solved import step_ends_s
from meshfold.passes.stages.virtual_stages import VirtualStageSearch

MEMORY = "layers under the memory above the best plan"
STAGES = "stages above the best plan"

TOLERANCE = 1e-3
"""Degrees that cannot be better by more than this share are left out; the gap says so."""

MOST_REPLICATED = 3
"""Degrees that are tried under HSDP as well."""

REPLICAS = "ZeRO inside a node in pipelines"
"""The name of what is left out of HSDP."""

FULL = 0.98
"""Of its memory, from which on a device is full."""

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
    plan of any candidate, the one without a pipeline included, with one stage per device is faster.
    searched: (degrees,
    bound, step) of the candidates whose stages were searched; step None where no plan is faster."""

    best: PricedPipeline | None
    lower_bound_s: float
    pruned: dict[str, int]
    searched: tuple[tuple[UniformStrategy, float, float | None], ...]
    found: tuple[PricedPipeline, ...] = ()
    """The plans of all candidates that have one, best among them."""

    several: InterleavedOutcome = field(default_factory=InterleavedOutcome)
    """Under schedules of several virtual stages that nobody asked for."""

    left_out: Mapping[str, int] = field(default_factory=dict)
    """By name, what was not tried and no bound rules out."""

    candidates: tuple["_Pipeline", ...] = ()
    """Those of one stage per device that took part, for beyond_sums."""

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
    step_s: float = np.inf,
    lower_bound_s: float = np.inf,
    num_starts: int = NUM_STARTS,
) -> PipelineOutcome:
    """The best pipeline that beats `step_s`, the step of the best plan without one, whose own lower
    bound is `lower_bound_s` (both infinite where there is none). num_starts: see
    search_interleaved."""
    race = _Race(problems, tree, step_s)
    bounds_s = peak_rate_bounds_s(problems, tree).tolist()
    pipelines = [_Pipeline(race, d, s) for d, s in zip(tree.candidates, bounds_s, strict=True)]
    plain, replicated = _with_replicas_apart(pipelines)
    without = [SolvedCandidate(lower_bound_s, step_s)] if np.isfinite(step_s) else []
    result = best_first([*plain, *without], tolerance=TOLERANCE)
    pruned = _pruned(tree, result)
    best = result.best.found if isinstance(result.best, _Pipeline) else None
    near = _near(replicated, plain) if result.best else []
    if near:
        so_far = SolvedCandidate(result.lower_bound_s, race.incumbent_s)
        result = best_first([*near, so_far], tolerance=TOLERANCE)
        pruned += _pruned(tree, result)
        best = result.best.found if isinstance(result.best, _Pipeline) else best
    bound_s = result.lower_bound_s if result.best else np.inf
    several = _search_several(race, [*plain, *near], num_starts)
    searched = tuple((p.degrees, *p.searched) for p in pipelines if p.searched)
    found = [p.found for p in pipelines if p.found]
    of_several = [priced_pipeline([*plain, *near][k].problem, x) for k, x in several.found]
    if of_several and of_several[0].step_s < race.incumbent_s:
        best = of_several[0]
    left_out = dict(several.left_out)
    took_part = (*plain, *near)
    if far := [p for p in replicated if p not in near and p.bound_s < race.incumbent_s]:
        left_out[REPLICAS] = sum(tree.num_kinds(p.degrees) for p in far)
    of_found = (*found, *of_several)
    return PipelineOutcome(
        best, bound_s, dict(pruned), searched, of_found, several, left_out, took_part
    )


def beyond_sums(outcome: PipelineOutcome, limit_s: float, most: int) -> PipelineOutcome:
    """`outcome` with plans of up to `most` candidates that had none and add up to less than
    limit_s, the lowest bound first: they may simulate faster than what adds up to less."""
    waiting = [p for p in outcome.candidates if p.found is None]
    for pipeline in waiting:
        pipeline.reopen(limit_s)
    queue = BoundQueue(waiting)
    found: list[PricedPipeline] = []
    while len(found) < most and (popped := queue.pop(limit_s)) is not None:
        found += [popped.found] if popped.found else []
    searched = tuple((p.degrees, *p.searched) for p in outcome.candidates if p.searched)
    return replace(outcome, found=(*outcome.found, *found), searched=searched)


def with_counted_memory(
    found: PricedPipeline, peaks: IntArray, num_starts: int = NUM_STARTS
) -> PricedPipeline | None:
    """The best pipeline of the same degrees and schedule on devices whose memory is by so much more
    or less as `found` adds up to more or less than its simulated peaks; None where none is found,
    and where peaks that fit leave nothing to gain: no device is full as added up, or little is
    left. Devices of one stage are given no more: the bound holds for what adds up to their
    memory. num_starts: see search_interleaved."""
    plan, capacity_bytes = found.plan, found.problem.capacity_bytes
    added, budgets = np.array(plan.memory_bytes), np.array(plan.budgets_bytes)
    counted = np.maximum(0, added + capacity_bytes - peaks)
    is_over = peaks > capacity_bytes
    if not is_over.any() and (
        plan.schedule.num_virtual_stages == 1
        or (added < FULL * budgets).all()
        or (peaks > FULL * capacity_bytes).any()
    ):
        return None
    if plan.schedule.num_virtual_stages == 1:
        counted = np.minimum(counted, budgets)
    memory_bytes = np.where(is_over, counted, np.maximum(counted, budgets))
    chain = replace(found.problem.chain, memory_bytes=memory_bytes)
    fitting: PipelinePlan | float = np.inf
    if plan.schedule.num_virtual_stages > 1:
        search = VirtualStageSearch(chain, plan.schedule)
        search.find_beside(plan.stages)
        search.find_further(num_starts)
        if np.isfinite(search.step_s):
            fitting = search.plan(search.proven_s, capped=False)
    else:
        fitting = search_faster_stages(chain, [plan.schedule], np.inf, max_branches=0)
    return priced_pipeline(found.problem, fitting) if isinstance(fitting, PipelinePlan) else None


def _with_replicas_apart(
    pipelines: Sequence["_Pipeline"],
) -> tuple[list["_Pipeline"], list["_Pipeline"]]:
    """(the others, those under HSDP beside the same degrees with ZeRO over all of dp)."""
    all_degrees = {p.degrees for p in pipelines}
    replicated = [
        p for p in pipelines if p.degrees.dp_shard and replace(p.degrees, dp_shard=0) in all_degrees
    ]
    apart = set(replicated)
    return [p for p in pipelines if p not in apart], replicated


def _near(replicated: Sequence["_Pipeline"], plain: Sequence["_Pipeline"]) -> list["_Pipeline"]:
    """MOST_REPLICATED of `replicated`: those whose plain degrees have the lowest bounds, with
    layers under the memory, that ruled them out or did not."""
    bounds = {p.degrees: (p.bound_s, p.order) for p in plain if p.is_priced}
    ranked = [
        (bounds[degrees], p)
        for p in replicated
        if (degrees := replace(p.degrees, dp_shard=0)) in bounds
    ]
    return [p for _, p in sorted(ranked, key=lambda entry: entry[0])[:MOST_REPLICATED]]


def _pruned(tree: PipelineTree, result: BestFirstResult[TieredCandidate]) -> Counter[str]:
    """Strategies of what bounds left, by the last bound that was asked for."""
    pruned = Counter[str]()
    for pipeline in result.left if result.best else ():
        if isinstance(pipeline, _Pipeline):
            pruned[pipeline.rule] += tree.num_kinds(pipeline.degrees)
    return pruned


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

    @property
    def is_typed(self) -> bool:
        return self.rule != PEAK_RATE

    def reopen(self, limit_s: float) -> None:
        """Ask its stages for a plan faster than limit_s, whatever other candidates have."""
        self.race = replace(self.race, incumbent_s=limit_s)
        self.__dict__.pop("_stages", None)
        self.ask_last_again()

    @property
    def has_replicas(self) -> bool:
        return self.degrees.dp_shard > 0

    @property
    def is_priced(self) -> bool:
        return self.rule in (MEMORY, STAGES)

    @cached_property
    def kernels(self) -> KernelSums:
        return kernel_sums(self.race.problems, self.race.tree.strategies_of(self.degrees))

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


def _search_several(
    race: _Race, pipelines: Sequence[_Pipeline], num_starts: int
) -> InterleavedOutcome:
    """Whether a schedule of several virtual stages is faster than all of one, on any degrees whose
    peak rate leaves that open."""
    several = {k: race.tree.several_of(p.degrees) for k, p in enumerate(pipelines)}
    several = {k: schedules for k, schedules in several.items() if schedules}
    if not several:
        return InterleavedOutcome()
    least_s = peak_rate_bounds_s(race.problems, race.tree, ScheduleKind.INTERLEAVED)
    several = {k: s for k, s in several.items() if least_s[k] < race.incumbent_s}
    of_degrees = {k: pipelines[k] for k in several}
    seconds = race.incumbent_s, race.problems.launch_s
    return search_interleaved(of_degrees, several, *seconds, num_starts)


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
