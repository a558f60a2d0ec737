"""Step time of a typed program: compute, exposed communication, optimizer.

Instance i has forward compute f_i and backward compute b_i, in-graph communication c_i in each
direction (exposed, it is in the data flow), parameter gather g_i and gradient reduction d_i. Where
a region is recomputed, b_i and the backward's c_i include its second forward
(passes/region_price.py); it waits for the same gather as the backward does. The runtime gathers
while the region before runs and reduces gradients beside the backward of the regions before, on one
communication stream. In a run of equal layers, what hides there is a layer's own:

    forward   g_0 + sum_i max(f_i + c_i, g_i)
    backward  sum_i max(b_i + c_i, g_i + d_i) + d_0

The excess of each max over f_i or b_i is exposed. Each instance is charged with its own gather and
reduction, so a step is a sum over instances, which the run search minimises (passes/mesh_plan.py).
Where two neighbours disagree about the layout of a value, the consumer converts it (border_s). The
optimizer is one memory-bound pass over the local states.
"""

from collections import Counter
from collections.abc import Sequence

from meshfold.cost_models.cost_model import CostModel
from meshfold.opgraph import FoldedGraph, SourceKind
from meshfold.passes.conversions import conversion_cost
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
    counts = Counter(instance.region for instance in folded.instances)
    forward_s = sum(n * prices[r].forward_s for r, n in counts.items())
    backward_s = sum(n * prices[r].backward_s for r, n in counts.items())
    total_s = sum(n * instance_s(prices[r]) for r, n in counts.items())
    if not costs.mesh.axes:
        # Nothing to communicate: no rounding either.
        total_s = forward_s + backward_s
    total_s += sum(ends_s(prices[i.region]) for i in folded.instances[:1])
    total_s += border_s(folded, typings, costs)
    communication_s = {
        name: sum(n * prices[r].total_communication_s[name] for r, n in counts.items())
        for name in costs.mesh.names
    }
    return TimeEstimate(
        forward_s=forward_s,
        backward_s=backward_s,
        exposed_communication_s=max(0.0, total_s - forward_s - backward_s),
        optimizer_s=_optimizer_s(folded, typings, costs, optimizer),
        communication_s=communication_s,
    )


def instance_s(price: RegionPrice) -> float:
    """Seconds of one instance in a run, without the optimizer."""
    gather_s, reduce_s = sum(price.gather_s.values()), sum(price.reduce_s.values())
    forward_s = price.forward_s + price.graph_forward_s
    backward_s = price.backward_s + price.graph_backward_s
    return max(forward_s, gather_s) + max(backward_s, gather_s + reduce_s)


def ends_s(price: RegionPrice) -> float:
    """What the first instance adds: its gather and its reduction have nothing to hide behind."""
    return sum(price.gather_s.values()) + sum(price.reduce_s.values())


def border_s(folded: FoldedGraph, typings: Sequence[RegionTyping], costs: CostModel) -> float:
    """Conversions of values that leave their producer in another layout than the consumer takes."""
    crossings = Counter(
        (instance.region, slot, folded.instances[source.instance].region, source.output)
        for instance in folded.instances
        for slot, source in enumerate(instance.sources)
        if source.kind is SourceKind.VALUE
    )
    total = 0.0
    for (reader, slot, maker, output), count in crossings.items():
        left, taken = typings[maker].outputs[output], typings[reader].slots[slot]
        if left != taken:
            value = folded.regions[reader].graph.values[slot]
            total += count * conversion_cost(value, left, taken, costs.mesh, costs).total_s
    return total


def optimizer_s(state_bytes: float, costs: CostModel, optimizer: str) -> float:
    """The optimizer's pass over `state_bytes` of local parameters."""
    return costs.compute_s(0.0, OPTIMIZER_PASSES[optimizer] * state_bytes, "float32")


def _optimizer_s(
    folded: FoldedGraph, typings: Sequence[RegionTyping], costs: CostModel, optimizer: str
) -> float:
    state_bytes = sum(
        local_bytes(folded.regions[r].graph.values[i], layout, costs.mesh.sizes)
        for r, i, layout in parameter_layouts(folded, typings).values()
    )
    return optimizer_s(state_bytes, costs, optimizer)


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
