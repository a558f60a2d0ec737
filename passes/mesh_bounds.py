"""A lower bound on every program of one mesh, before any of its regions is typed.

Per instance, with the flops of its ops over all ranks and the gradients of its parameters reduced
over dp at least, in the cheapest way there is:

    forward_s + max(backward_s, reduction_s)          a part of instance_s (passes/step_time.py)

Typing a mesh takes a search per region; this takes microseconds. It prunes meshes on which dp is
what it is elsewhere while fewer ranks shard the weights, as context parallelism does beside tensor
parallelism.
"""

from meshfold.cost_models.compute import op_work
from meshfold.cost_models.cost_model import CostModel
from meshfold.opgraph import FoldedGraph, OpGraph, SlotKind
from meshfold.passes.boundaries import num_instances
from meshfold.passes.data_parallel import DataParallel
from meshfold.passes.op_time import compute_dtype
from meshfold.passes.region_price import layouts_of_values
from meshfold.spmd import REPLICATE
from meshfold.strategy import RegionTyping


def least_step_s(folded: FoldedGraph, data: DataParallel, costs: CostModel) -> float:
    """Seconds that no program on the mesh of `costs` is below. data: what regions do on its dp
    axis, axis 0."""
    total_s = 0.0
    for region, count in num_instances(folded).items():
        graph = folded.regions[region].graph
        forward_s, backward_s = _compute_s(graph, costs)
        reduction_s = _reduction_s(graph, data.solutions[region].typing, costs)
        total_s += count * (forward_s + max(backward_s, reduction_s))
    return total_s


def _compute_s(graph: OpGraph, costs: CostModel) -> tuple[float, float]:
    """Forward and backward, every op cut over all ranks."""
    parts = costs.mesh.num_ranks
    forward_s = backward_s = 0.0
    for op in graph.ops:
        work, dtype = op_work(graph, op), compute_dtype(graph, op)
        forward_s += costs.compute_s(work.flops / parts, 0.0, dtype)
        backward_s += costs.compute_s(work.backward_flops / parts, 0.0, dtype)
    return forward_s, backward_s


def _reduction_s(graph: OpGraph, typing: RegionTyping, costs: CostModel) -> float:
    """Gradients of the parameters that the ops read whole on dp, cut over tp."""
    mesh = costs.mesh
    demands = layouts_of_values(graph, typing)
    num_bytes = sum(
        graph.values[i].num_bytes
        for i, slot in enumerate(graph.slots)
        if slot.kind is SlotKind.PARAMETER and graph.values[i].requires_grad
        if any(layout[0] == REPLICATE for layout in demands[i][1])
    )
    local_bytes = num_bytes // (mesh.sizes[mesh.index("tp")] if "tp" in mesh.names else 1)
    batch_axes = [k for k, name in enumerate(mesh.names) if name != "tp"]
    return min(
        costs.collective_s("reduce_scatter", local_bytes, (0,)),
        costs.collective_s("all_reduce", local_bytes, (0,)),
        costs.collective_s("all_reduce", local_bytes, batch_axes),
    )
