"""Step time of a typed program: compute, exposed communication, optimizer.

Regions run in program order, instance i with forward compute f_i and backward compute b_i, in-graph
communication c_i in each direction (exposed, it is in the data flow), parameter gather g_i and
gradient reduction d_i. Where a region is recomputed, b_i and the backward's c_i include its second
forward (passes/region_price.py); it waits for the same gather as the backward does. The runtime
starts the gather of the next region when one begins and reduces gradients beside the backward of
the regions before it, so on one communication stream

    forward   g_0 + sum_i max(f_i + c_i, g_{i+1})
    backward  sum_i max(b_i + c_i, g_{i-1} + d_{i+1}) + d_0        i from last to first

The excess of each max over f_i or b_i is exposed. The last region's parameters are still there when
backward starts. The optimizer is one memory-bound pass over the local states.
"""

from collections.abc import Sequence

from meshfold.cost_models.cost_model import CostModel
from meshfold.opgraph import FoldedGraph, SourceKind
from meshfold.passes.parameter_prices import local_bytes
from meshfold.passes.region_price import RegionPrice
from meshfold.plan import TimeEstimate
from meshfold.spmd import Layout
from meshfold.strategy import RegionTyping

OPTIMIZER_PASSES = {"adamw": 7, "sgd": 3}
"""Reads and writes of parameter-sized tensors per step: AdamW reads parameter, gradient and two
moments and writes parameter and moments; SGD without momentum reads two and writes one."""


def estimate_step(
    folded: FoldedGraph,
    typings: Sequence[RegionTyping],
    prices: Sequence[RegionPrice],
    costs: CostModel,
    optimizer: str,
) -> TimeEstimate:
    """Step time of all instances in order. typings, prices: per region."""
    order = [prices[instance.region] for instance in folded.instances]
    forward_s = sum(p.forward_s for p in order)
    backward_s = sum(p.backward_s for p in order)
    total_s = _forward_s(order) + _backward_s(order)
    communication_s = {
        name: sum(p.total_communication_s[name] for p in order) for name in costs.mesh.names
    }
    return TimeEstimate(
        forward_s=forward_s,
        backward_s=backward_s,
        exposed_communication_s=max(0.0, total_s - forward_s - backward_s),
        optimizer_s=_optimizer_s(folded, typings, costs, optimizer),
        communication_s=communication_s,
    )


def _forward_s(order: Sequence[RegionPrice]) -> float:
    gathers = [sum(p.gather_s.values()) for p in order]
    total = sum(gathers[:1])
    for p, next_gather in zip(order, [*gathers[1:], 0.0], strict=True):
        total += max(p.forward_s + p.graph_forward_s, next_gather)
    return total


def _backward_s(order: Sequence[RegionPrice]) -> float:
    gathers = [0.0, *(sum(p.gather_s.values()) for p in order[:-1])]
    reductions = [sum(p.reduce_s.values()) for p in order]
    total = sum(reductions[:1])
    for p, gather, reduction in zip(order, gathers, [*reductions[1:], 0.0], strict=True):
        total += max(p.backward_s + p.graph_backward_s, gather + reduction)
    return total


def _optimizer_s(
    folded: FoldedGraph, typings: Sequence[RegionTyping], costs: CostModel, optimizer: str
) -> float:
    state_bytes = sum(
        local_bytes(folded.regions[r].graph.values[i], layout, costs.mesh.sizes)
        for r, i, layout in parameter_layouts(folded, typings).values()
    )
    return costs.compute_s(0.0, OPTIMIZER_PASSES[optimizer] * state_bytes, "float32")


def parameter_layouts(
    folded: FoldedGraph, typings: Sequence[RegionTyping]
) -> dict[str, tuple[int, int, Layout]]:
    """Canonical parameter name -> (region, slot, stored layout) of its first use."""
    found: dict[str, tuple[int, int, Layout]] = {}
    for instance in folded.instances:
        for i, source in enumerate(instance.sources):
            if source.kind is SourceKind.PARAMETER:
                layout = typings[instance.region].slots[i]
                found.setdefault(source.name, (instance.region, i, layout))
    return found
