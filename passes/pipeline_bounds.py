"""Lower bounds on the step of a pipeline, before any stage is cut.

Both count the least bubble of p stages and m microbatches (cost_models/stages.py):

    peak rate   the floating-point operations of a microbatch at the rate of the device; for all
                choices of degrees at once
    kernels     its kernels and its collectives on tp, every layer at its fastest; asks for a region
                search per size of a rank's microbatch and tp
"""

from collections.abc import Sequence

import numpy as np

from meshfold.cost_models.compute import op_work
from meshfold.cost_models.cost_model import CostModel
from meshfold.cost_models.meshes import build_mesh
from meshfold.cost_models.stages import bubble_factor
from meshfold.opgraph import OpGraph
from meshfold.passes.pipeline_problem import PipelineProblems
from meshfold.passes.pipeline_tree import PipelineTree
from meshfold.passes.run_dual import FloatArray
from meshfold.strategy import UniformStrategy

PEAK_RATE = "peak rate and bubble above the best plan"
KERNELS = "kernels and bubble above the best plan"


def peak_rate_bounds_s(
    problems: PipelineProblems, candidates: Sequence[UniformStrategy]
) -> FloatArray:
    """Per candidate: all floating-point operations evenly over all devices, and the bubble."""
    costs = CostModel(problems.cluster, build_mesh(problems.cluster, 1, 1))
    by_region = [_peak_rate_s(region.graph, costs) for region in problems.folded.regions]
    whole_s = sum(by_region[i.region] for i in problems.folded.instances)
    parts = np.array([d.dp * d.tp * d.microbatches for d in candidates])
    bubbles = np.array([_least_bubble(d) for d in candidates])
    return np.asarray(whole_s / parts * bubbles, float)


def kernels_bound_s(
    problems: PipelineProblems, tree: PipelineTree, degrees: UniformStrategy
) -> float:
    """Of one candidate; infinite where tp > 1 shards no weights."""
    recomputes = list(dict.fromkeys(r for _, r in tree.kinds))
    tables = problems.tables(degrees, recomputes)
    if degrees.tp > 1 and tables.sharded_fraction == 0:
        return float("inf")
    return tables.fastest_s * _least_bubble(degrees)


def _least_bubble(degrees: UniformStrategy) -> float:
    return bubble_factor(degrees.pp, degrees.microbatches, degrees.pp - 1)


def _peak_rate_s(graph: OpGraph, costs: CostModel) -> float:
    """Seconds of a region's floating-point operations on one device, launches left out."""
    total_s = 0.0
    for op in graph.ops:
        work = op_work(graph, op)
        operands = [graph.values[v] for v in op.operands]
        dtype = next((v.dtype for v in operands if v.is_float), "float32")
        for flops in (work.flops, work.backward_flops):
            total_s += max(0.0, costs.compute_s(flops, 0.0, dtype) - costs.launch_s)
    return total_s
