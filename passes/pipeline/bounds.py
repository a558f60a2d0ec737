"""Lower bounds on the step of a pipeline, before any division into stages.

Both count the least bubble of p devices and m microbatches under any schedule that is offered
(least_step_s):

    peak rate   the floating-point operations of a microbatch at the rate of the device; for all
                choices of degrees at once
    kernels     every layer at the least of its costs (layers.py), which are what stages
                are made of; asks for a region search per size of a rank's microbatch and tp
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.cost_models.op_costs.compute import op_work
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.cost_models.pipeline.bubble_bounds import bubble_factor, split_bubble_factor
from meshfold.cost_models.pipeline.schedules import V_ORDERS, ScheduleKind
from meshfold.ir.op_graph import OpGraph
from meshfold.ir.strategy import UniformStrategy
from meshfold.passes.pipeline.problem import PipelineProblems
from meshfold.passes.pipeline.tree import PipelineTree
from meshfold.passes.run.hull import FloatArray

PEAK_RATE = "peak rate and bubble above the best plan"
KERNELS = "kernels and bubble above the best plan"

SEVERAL_VIRTUAL_STAGES = (ScheduleKind.INTERLEAVED, ScheduleKind.INTERLEAVED_ZERO_BUBBLE, *V_ORDERS)


@dataclass(frozen=True)
class LayerSums:
    """Seconds of one microbatch. all_s: through all layers, both ways; above_s: a share, and the
    seconds of the layers of whose seconds at least so much is forward."""

    all_s: float
    above_s: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, layers: Sequence[tuple[float, float]]) -> "LayerSums":
        """layers: forward, forward and backward of each."""
        seconds: dict[float, float] = {}
        for (forward_s, total_s), count in Counter(layers).items():
            share = forward_s / total_s if total_s else 0.0
            seconds[share] = seconds.get(share, 0.0) + count * total_s
        above_s = tuple(
            (share, sum(s for other, s in seconds.items() if other >= share)) for share in seconds
        )
        return cls(sum(total_s for _, total_s in layers), above_s)


def peak_rate_bounds_s(
    problems: PipelineProblems, tree: PipelineTree, kind: ScheduleKind | None = None
) -> FloatArray:
    """Lower bounds of the tree's candidates: all floating-point operations evenly over all devices,
    and the bubble. kind: under this schedule alone."""
    costs = CostModel(problems.cluster, build_mesh(problems.cluster, 1, 1))
    by_region = [_peak_rate_s(region.graph, costs) for region in problems.folded.regions]
    sums = LayerSums.of([by_region[i.region] for i in problems.folded.instances])
    bounds = []
    for degrees in tree.candidates:
        num_shards = degrees.degrees.batch_ranks * degrees.cp * degrees.tp * degrees.microbatches
        kinds = _kinds(tree, degrees) if kind is None else {kind}
        bounds.append(least_step_s(degrees, kinds, sums) / num_shards)
    return np.array(bounds)


def kernels_bound_s(
    problems: PipelineProblems,
    tree: PipelineTree,
    degrees: UniformStrategy,
    kind: ScheduleKind | None = None,
) -> float:
    """The lower bound of one candidate; infinite where tp > 1 shards no weights. kind: see
    peak_rate_bounds_s."""
    if not shards_weights(problems, tree, degrees):
        return float("inf")
    strategies = tree.strategies_of(degrees)
    kinds = _kinds(tree, degrees) if kind is None else {kind}
    return least_step_s(degrees, kinds, LayerSums.of(problems.fastest_s(strategies)))


def shards_weights(
    problems: PipelineProblems, tree: PipelineTree, degrees: UniformStrategy
) -> bool:
    """Whether tp, if there is any, shards a weight."""
    recomputes = dict.fromkeys(s.recompute for s in tree.strategies_of(degrees))
    tables = problems.tables(degrees, list(recomputes))
    return degrees.tp == 1 or tables.sharded_fraction > 0


@dataclass(frozen=True)
class KernelSums:
    """Seconds of one microbatch through all layers at their least: forward, forward and backward,
    and of these weight gradients alone."""

    forward_s: float
    total_s: float
    weight_s: float


def kernel_sums(problems: PipelineProblems, strategies: Sequence[UniformStrategy]) -> KernelSums:
    """Of `strategies`, alike in all degrees; infinite where tp > 1 shards no weights."""
    tables = problems.tables(strategies[0], list(dict.fromkeys(s.recompute for s in strategies)))
    if strategies[0].tp > 1 and tables.sharded_fraction == 0:
        return KernelSums(float("inf"), float("inf"), 0.0)
    forward_s, total_s = np.sum(problems.fastest_s(strategies), axis=0).tolist()
    weight_s = sum(tables.layers[i.region].weight_s for i in tables.folded.instances)
    return KernelSums(forward_s, total_s, min(weight_s, total_s - forward_s))


def least_step_s(
    degrees: UniformStrategy, kinds: Collection[ScheduleKind], layers: LayerSums
) -> float:
    """No division of `layers` into stages makes a faster step under any of `kinds`.

    zero_bubble: layers with little forward weaken the bound of all, so those above each share of it
    are tried alone. Several virtual stages: work over devices; how long they fill depends on the
    boundaries.
    """
    p, m = degrees.pp, degrees.microbatches
    all_s = layers.all_s
    bounds = []
    if ScheduleKind.GPIPE in kinds or ScheduleKind.ONE_F_ONE_B in kinds:
        bounds.append(all_s * bubble_factor(p, m, p - 1))
    if ScheduleKind.ZERO_BUBBLE in kinds:
        least = [
            all_s * m / p,
            *(s * split_bubble_factor(p, m, share) for share, s in layers.above_s),
        ]
        bounds.append(max(least))
    if any(kind in kinds for kind in SEVERAL_VIRTUAL_STAGES):
        bounds.append(all_s * m / p)
    return min(bounds)


def _kinds(tree: PipelineTree, degrees: UniformStrategy) -> set[ScheduleKind]:
    return {schedule.kind for schedule in tree.schedules_of(degrees)}


def _peak_rate_s(graph: OpGraph, costs: CostModel) -> tuple[float, float]:
    """Seconds of a region's floating-point operations on one device, launches left out: forward,
    and forward and backward."""
    seconds = [0.0, 0.0]
    for op in graph.ops:
        work = op_work(graph, op)
        operands = [graph.values[v] for v in op.operands]
        dtype = next((v.dtype for v in operands if v.is_float), "float32")
        for at, kernels_s in enumerate(costs.op_s(work, dtype, share=0.0)):
            seconds[at] += max(0.0, kernels_s - costs.launch_s)
    return seconds[0], sum(seconds)
