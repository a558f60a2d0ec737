"""The best uniform 3D plan: every layer under one strategy, layers divided evenly into stages.

What people write down by hand (Narayanan et al., SC 2021): tp inside a node, pp stages of equally
many layers with the embedding on the first and the head on the last, dp with the rest; 1f1b with
the least warm-up. Of all such plans that fit the fastest, lowest bound first.
"""

from dataclasses import dataclass

import numpy as np

from meshfold.cost_models.pipeline.makespan import StageTimes, device_ends_s
from meshfold.cost_models.pipeline.schedules import Schedule, ScheduleKind
from meshfold.errors import InfeasibleError
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.strategy import UniformStrategy
from meshfold.passes.pipeline.best_first import BoundRule, Solution, best_first
from meshfold.passes.pipeline.bounds import KERNELS, PEAK_RATE, kernels_bound_s, peak_rate_bounds_s
from meshfold.passes.pipeline.layers import LayerFigures
from meshfold.passes.pipeline.problem import PipelineProblem, PipelineProblems
from meshfold.passes.pipeline.tree import PipelineTree


@dataclass(frozen=True)
class UniformPipeline:
    """Step and peak memory of the worst device."""

    strategy: UniformStrategy
    step_s: float
    peak_bytes: int


def best_uniform_pipeline(problems: PipelineProblems, tree: PipelineTree) -> UniformPipeline | None:
    """The fastest that fits; None where none does."""

    def solve(index: int, _: float) -> Solution[UniformPipeline] | None:
        strategies = tree.strategies_of(tree.candidates[index])
        problem = problems.problem(strategies)
        found = [uniform_pipeline(problems, problem, strategy) for strategy in strategies]
        fitting = [x for x in found if x is not None and x.peak_bytes <= problem.capacity_bytes]
        if not fitting:
            return None
        best = min(fitting, key=lambda x: (x.step_s, x.strategy.label))
        return Solution(best.step_s, best.step_s, best)

    kind = ScheduleKind.ONE_F_ONE_B
    kernels = BoundRule(
        KERNELS, lambda i: kernels_bound_s(problems, tree, tree.candidates[i], kind)
    )
    bounds = peak_rate_bounds_s(problems, tree, kind)
    keys = [(d.pp, *d.degrees, d.microbatches, d.sequence_parallel) for d in tree.candidates]
    try:
        return best_first(keys, (PEAK_RATE, bounds), solve, refine=[kernels]).solution.plan
    except InfeasibleError:
        return None


def uniform_pipeline(
    problems: PipelineProblems, problem: PipelineProblem, strategy: UniformStrategy
) -> UniformPipeline | None:
    """All layers under `strategy`; None where there are fewer layers than stages."""
    by_region = problems.figures([strategy])
    layers = [by_region[i.region][0] for i in problems.folded.instances]
    cuts = even_cuts(problems.folded, strategy.pp)
    schedule = Schedule(ScheduleKind.ONE_F_ONE_B, strategy.pp, strategy.microbatches)
    stages = [layers[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    times = StageTimes.build(
        [sum(x.forward_s for x in stage) for stage in stages],
        [sum(x.backward_s for x in stage) for stage in stages],
        hop_s=problem.chain.hop_s[cuts[1:-1]],
    )
    ends_s = device_ends_s(schedule, times) + [sum(x.sync_s for x in stage) for stage in stages]
    peaks = [
        _peak_bytes(stage, int(problem.chain.held_bytes[first]), in_flight)
        for stage, first, in_flight in zip(stages, cuts, schedule.in_flight, strict=False)
    ]
    step_s = float(ends_s.max()) + problem.launch_s
    return UniformPipeline(strategy, step_s, max(peaks) + problem.fixed_bytes)


def _peak_bytes(stage: list[LayerFigures], held_bytes: int, in_flight: int) -> int:
    activations = sum(x.activation_bytes for x in stage) + held_bytes
    states = sum(x.state_bytes for x in stage)
    return states + in_flight * activations + max(x.passing_bytes for x in stage)


def even_cuts(folded: FoldedGraph, num_stages: int) -> list[int]:
    """First layer of each stage, and the number of layers: the longest run in equal parts, what is
    before and behind it on the first and the last stage; or all layers in parts that are as equal
    as can be, where that run does not divide."""
    num_layers = len(folded.instances)
    _, first, count = max(folded.runs, key=lambda run: (run[2], -run[1]))
    if count % num_stages == 0:
        each = count // num_stages
        return [0, *(first + each * i for i in range(1, num_stages)), num_layers]
    parts = np.array_split(np.arange(num_layers), num_stages)
    return [*(int(part[0]) for part in parts), num_layers]
