"""The strategies that people would try first, priced beside the plan.

In one pass: DDP, ZeRO-3, ZeRO-3 inside a node and replicated over nodes (HSDP), Megatron's tp in a
node, and the best strategy that all layers share. As a pipeline what people write down by hand
(Narayanan et al., SC 2021): tp inside a node, pp stages of equally many layers with the embedding
on the first and the head on the last, dp with the rest; 1f1b with the least warm-up. Of all such
pipelines that fit the fastest, lowest bound first. What does not fit in one pass is in
accumulation.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from meshfold.cost_models.pipeline.bubble_bounds import bubble_factor
from meshfold.cost_models.pipeline.makespan import StageTimes, device_ends_s
from meshfold.cost_models.pipeline.schedules import Schedule, ScheduleKind
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.plan import PricedStrategy
from meshfold.ir.strategy import UniformStrategy
from meshfold.passes.one_pass.best_first import Solution, TieredCandidate, best_first
from meshfold.passes.one_pass.priced import Priced, order_of
from meshfold.passes.one_pass.search import MeshPlanner
from meshfold.passes.pipeline.bounds import kernels_bound_s, peak_rate_bounds_s
from meshfold.passes.pipeline.layers import StrategyCosts
from meshfold.passes.pipeline.problem import PipelineProblems
from meshfold.passes.pipeline.tree import PipelineTree, degrees_order
from meshfold.units import bytes_text

MEGATRON = "Megatron tp+sp in a node, dp outside"

UNIFORM_KIND = ScheduleKind.ONE_F_ONE_B
"""The schedule of uniform pipelines."""

NUM_UNIFORM = 8
"""Uniform strategies per mesh whose exact costs are taken, the most promising first."""

SAME_STEP = 1e-8
"""Share of a step within which labels decide between two."""


def named_baselines(cluster: ClusterSpec) -> dict[str, UniformStrategy]:
    """Name -> strategy on all devices."""
    n = cluster.num_devices
    node = min(group.devices_per_node for group in cluster.groups)
    named = {}
    if n > 1:
        named["DDP"] = UniformStrategy(dp=n)
        named["ZeRO-3"] = UniformStrategy(dp=n, zero=3)
        if 1 < node < n and n % node == 0:
            named["HSDP"] = UniformStrategy(dp=n, zero=3, dp_shard=node)
        if node > 1 and n % node == 0:
            named[MEGATRON] = UniformStrategy(dp=n // node, tp=node, sequence_parallel=True)
    return named


def baseline_rows(
    named: Mapping[str, Priced], planners: Sequence[MeshPlanner]
) -> tuple[PricedStrategy, ...]:
    """One row per named baseline, and the best uniform strategy on the meshes of `planners`."""
    rows = [_row(name, priced) for name, priced in named.items()]
    uniform = [p for planner in planners for p in _most_promising(planner)]
    if uniform:
        best = min(uniform, key=lambda p: (not p.memory.fits, *order_of(p)))
        rows.append(_row("best uniform strategy", best))
    return tuple(rows)


def _most_promising(planner: MeshPlanner) -> list[Priced]:
    """Exact costs of uniform strategies in order of their time, up to the first that fits;
    those whose states and activations alone do not are left out."""
    found: list[Priced] = []
    ordered = planner.uniform_by_time()
    possible = [s for s in ordered if planner.uniform_bytes(s) <= planner.capacity_bytes]
    for strategy in (possible or ordered)[:NUM_UNIFORM]:
        found.append(planner.uniform(strategy))
        if found[-1].memory.fits:
            break
    return found


def _row(name: str, priced: Priced) -> PricedStrategy:
    memory = priced.memory
    note = "" if memory.fits else f"{bytes_text(memory.peak - memory.capacity)} too much"
    return PricedStrategy(name, priced.strategy, priced.time.step_s, memory.peak, memory.fits, note)


@dataclass(frozen=True)
class UniformPipeline:
    """Step and peak memory of the worst device."""

    strategy: UniformStrategy
    step_s: float
    peak_bytes: int


def best_uniform_pipeline(problems: PipelineProblems, tree: PipelineTree) -> UniformPipeline | None:
    """The fastest that fits; None where none does."""
    bounds_s = peak_rate_bounds_s(problems, tree, UNIFORM_KIND).tolist()
    of = zip(tree.candidates, bounds_s, strict=True)
    best = best_first([_UniformDegrees(problems, tree, *x) for x in of]).best
    return best.found if best else None


class _UniformDegrees(TieredCandidate):
    """One choice of degrees. found: the best uniform pipeline on them."""

    def __init__(
        self,
        problems: PipelineProblems,
        tree: PipelineTree,
        degrees: UniformStrategy,
        bound_s: float,
    ) -> None:
        kernels_s = partial(kernels_bound_s, problems, tree, degrees, UNIFORM_KIND)
        super().__init__(degrees_order(degrees), bound_s, [kernels_s])
        self.found: UniformPipeline | None = None
        self._problems, self._strategies = problems, tree.strategies_of(degrees)

    def solve(self, beat_s: float, /) -> Solution:
        """The best of all strategies, lowest bound first; none that cannot be as fast as beat_s."""
        least_s = {s: uniform_bound_s(self._problems, s) for s in self._strategies}
        fitting: list[UniformPipeline] = []
        for strategy in sorted(least_s, key=lambda s: (least_s[s], s.label)):
            if least_s[strategy] > min([beat_s, *(x.step_s for x in fitting)]) * (1 + SAME_STEP):
                break
            found = uniform_pipeline(self._problems, strategy)
            fitting += [found] if found is not None else []
        if not fitting:
            return Solution(np.inf)
        self.found = min(fitting, key=lambda x: (x.step_s, x.strategy.label))
        return self.solution(self.found.step_s, self.found.step_s)


def uniform_bound_s(problems: PipelineProblems, strategy: UniformStrategy) -> float:
    """What uniform_pipeline with `strategy` takes at least; nothing is asked about memory, and
    recomputation and the host only add seconds."""
    boundaries = even_boundaries(problems.folded, strategy.pp)
    quick = replace(strategy, recompute="none", offload="none")
    layers_s = np.array([total_s for _, total_s in problems.fastest_s([quick])])
    busiest_s = np.add.reduceat(layers_s, boundaries[:-1]).max()
    filled_s = layers_s.sum() * bubble_factor(strategy.pp, strategy.microbatches)
    return float(max(strategy.microbatches * busiest_s, filled_s))


def uniform_pipeline(
    problems: PipelineProblems, strategy: UniformStrategy
) -> UniformPipeline | None:
    """All layers under `strategy`; None where they do not fit."""
    tables = problems.tables(strategy, [strategy.recompute])
    by_region = problems.layer_costs([strategy])
    layers = [by_region[i.region][0] for i in problems.folded.instances]
    boundaries = even_boundaries(problems.folded, strategy.pp)
    schedule = Schedule(UNIFORM_KIND, strategy.pp, strategy.microbatches)
    stages = [layers[a:b] for a, b in zip(boundaries, boundaries[1:], strict=False)]
    peaks = [
        _peak_bytes(stage, int(tables.crossing_bytes[first]), in_flight)
        for stage, first, in_flight in zip(stages, boundaries, schedule.in_flight, strict=False)
    ]
    peak_bytes = max(peaks) + problems.fixed_bytes(tables, strategy)
    if peak_bytes > problems.capacity_bytes:
        return None
    times = StageTimes.build(
        [sum(x.forward_s for x in stage) for stage in stages],
        [sum(x.backward_s for x in stage) for stage in stages],
        hop_s=problems.hops_s(tables, strategy)[np.array(boundaries[1:-1], int) - 1],
    )
    ends_s = device_ends_s(schedule, times) + [sum(x.sync_s for x in stage) for stage in stages]
    return UniformPipeline(strategy, float(ends_s.max()) + problems.launch_s, peak_bytes)


def _peak_bytes(stage: list[StrategyCosts], resident_bytes: int, in_flight: int) -> int:
    kept = sum(max(in_flight * x.activation_bytes, x.update_bytes) for x in stage)
    states = sum(x.state_bytes for x in stage) + in_flight * resident_bytes
    return states + kept + max(x.workspace_bytes for x in stage)


def even_boundaries(folded: FoldedGraph, num_stages: int) -> list[int]:
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
