"""Step time of a typed program: compute, exposed communication, optimizer.

Instance i has forward compute f_i and backward compute b_i, in-graph communication c_i in each
direction (exposed, it is in the data flow), parameter gather g_i and gradient reduction d_i. Where
a region is recomputed, b_i and the backward's c_i include its second forward
(passes/price/region.py); it waits for the same gather as the backward does. The runtime gathers
while the region before runs and reduces gradients during the backward of the regions before, on one
communication stream. In a run of equal layers, what hides there is a layer's own:

    forward   g_0 + p_0 + sum_i max(f_i + c_i, g_i + q_i, k_i, p_i) + o_i
    backward  sum_i max(b_i + c_i, g_i + d_i, g_i + q_i, k_i, u_i) + o_i + d_0 + u_0
                                                                          (no g_i under ZeRO 1, 2)

where o_i is what kernels lose to g_i and d_i beside them (overlap.py), and k_i, p_i and u_i are
what is saved, parameters and gradients moving between device and host, if offloaded
(passes/memory/zero.py): the link to the host is not the network, and carries both ways at once. q_i
are those of p_i that the device has only while the layer runs: one layer ahead there is a gather
behind its copy, and they come in backward, too.
The excess of each max over f_i or b_i is exposed. Each instance is charged with its own gather and
reduction, so a step is a sum over instances, which the run search minimises
(passes/one_pass/search.py). Where two neighbours differ in the layout of a value, the
consumer converts it (boundary_s). The optimizer's step (cost_models/op_costs/optimizers.py) is on
the device or on the host, one after the other; what the host updates comes with the next forward.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.cost_models.op_costs.optimizers import Update
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.plan import TimeEstimate
from meshfold.ir.strategy import UPDATED_BY_HOST, Offload, RegionTyping
from meshfold.passes.graph.reads import Crossing, ProgramReads, program_reads
from meshfold.passes.price.conversions import conversion_cost
from meshfold.passes.price.overlap import Busy
from meshfold.passes.price.parameters import local_update
from meshfold.passes.price.region import HostTraffic, RegionPrice


def estimate_step(
    folded: FoldedGraph,
    typings: Sequence[RegionTyping],
    prices: Sequence[RegionPrice],
    costs: CostModel,
    optimizer: str,
    offloads: Sequence[Offload] | None = None,
    reads: ProgramReads | None = None,
) -> TimeEstimate:
    """Step time of all instances in order. typings, prices: per region, and offloads; None:
    nothing on hosts. reads: of `folded` or of the graph that it
    was split from, if at hand."""
    reads = reads or program_reads(folded)
    counts = Counter(instance.region for instance in folded.instances)
    forward_s = sum(n * prices[r].forward_s for r, n in counts.items())
    backward_s = sum(n * prices[r].backward_s for r, n in counts.items())
    slowdown = costs.cluster.overlap_slowdown
    total_s = sum(n * instance_s(prices[r], slowdown) for r, n in counts.items())
    if not costs.mesh.axes and all(prices[r].host == HostTraffic() for r in counts):
        # Nothing to communicate: no rounding either.
        total_s = forward_s + backward_s
    total_s += sum(ends_s(prices[i.region]) for i in folded.instances[:1])
    total_s += boundary_s(folded, typings, costs, reads)
    communication_s = {
        name: sum(n * prices[r].total_communication_s[name] for r, n in counts.items())
        for name in costs.mesh.names
    }
    return TimeEstimate(
        forward_s=forward_s,
        backward_s=backward_s,
        exposed_communication_s=max(0.0, total_s - (forward_s + backward_s)),
        optimizer_s=_optimizer_s(folded, typings, costs, optimizer, offloads, reads),
        communication_s=communication_s,
    )


def instance_s(price: RegionPrice, slowdown: float) -> float:
    """Seconds of one instance in a run, without the optimizer. slowdown: of kernels and collectives
    that overlap."""
    gather_s, reduce_s = sum(price.gather_s.values()), sum(price.reduce_s.values())
    again_s = gather_s * (price.num_gathers - 1)
    forward = Busy(price.forward_s, price.graph_forward_s, slowdown)
    backward = Busy(price.backward_s, price.graph_backward_s, slowdown)
    host = price.host
    come_s = host.by_layer_s
    forward_s = max(forward.seconds, gather_s + come_s, host.saved_s, host.parameters_s)
    backward_s = max(
        *(backward.seconds, again_s + reduce_s, again_s + come_s),
        *(host.saved_s, host.gradients_s),
    )
    contention_s = forward.contention_s(gather_s) + backward.contention_s(again_s + reduce_s)
    return forward_s + backward_s + contention_s


def ends_s(price: RegionPrice) -> float:
    """What the first instance adds: nothing overlaps its gather, its reduction and the transfer of
    its parameters from the host and its gradients to it."""
    moved_s = sum(price.gather_s.values()) + sum(price.reduce_s.values())
    return moved_s + price.host.parameters_s + price.host.gradients_s


def host_waits_s(folded: FoldedGraph, prices: Sequence[RegionPrice], slowdown: float) -> float:
    """What a step waits for the link to the host, beyond what it would without offload. slowdown:
    as for instance_s."""
    if all(price.host == HostTraffic() for price in prices):
        return 0.0
    alone = [replace(price, host=HostTraffic()) for price in prices]
    pairs = list(zip(prices, alone, strict=True))
    extra_s = [instance_s(a, slowdown) - instance_s(b, slowdown) for a, b in pairs]
    first_s = sum(ends_s(prices[i.region]) - ends_s(alone[i.region]) for i in folded.instances[:1])
    return first_s + sum(extra_s[i.region] for i in folded.instances)


def boundary_s(
    folded: FoldedGraph,
    typings: Sequence[RegionTyping],
    costs: CostModel,
    reads: ProgramReads | None = None,
) -> float:
    """Conversions of values that leave their producer in another layout than the consumer takes.
    reads: as for estimate_step."""
    reads = reads or program_reads(folded)
    return sum(
        count
        * crossing_s(folded, crossing, typings[crossing.maker], typings[crossing.reader], costs)
        for crossing, count in reads.count_crossings(folded).items()
    )


def crossing_s(
    folded: FoldedGraph,
    crossing: Crossing,
    making: RegionTyping,
    reading: RegionTyping,
    costs: CostModel,
) -> float:
    """Seconds of converting what crosses once. making, reading: typings of its two regions."""
    left, wanted = making.outputs[crossing.output], reading.slots[crossing.slot]
    if left == wanted:
        return 0.0
    value = folded.regions[crossing.reader].graph.values[crossing.slot]
    return conversion_cost(value, left, wanted, costs).total_s


def optimizer_s(update: Update, costs: CostModel) -> float:
    """The optimizer's step on the device; its products are in bfloat16."""
    return costs.compute_s(update.flops, update.moved_bytes, "bfloat16")


def host_optimizer_s(update: Update, costs: CostModel, *, on_disk: bool = False) -> float:
    """The same where the host has the states: in its own memory. on_disk: they are read from its
    disk first and written behind, which nothing hides."""
    disk_s = costs.disk_s(2 * update.state_bytes) if on_disk else 0.0
    return costs.host_update_s(update.moved_bytes) + disk_s


def _optimizer_s(
    folded: FoldedGraph,
    typings: Sequence[RegionTyping],
    costs: CostModel,
    optimizer: str,
    offloads: Sequence[Offload] | None,
    reads: ProgramReads,
) -> float:
    """The device's pass, and the host's."""
    here, elsewhere, on_disk = Update(), Update(), Update()
    for (r, first), count in reads.count_first(folded).items():
        is_here = offloads is None or offloads[r] not in UPDATED_BY_HOST
        for i in first.parameters:
            value, layout = folded.regions[r].graph.values[i], typings[r].slots[i]
            update = local_update(value, layout, costs.mesh.sizes, optimizer).times(count)
            if is_here:
                here += update
            elif value.requires_grad and offloads and offloads[r] == "disk":
                on_disk += update
            elif value.requires_grad:
                elsewhere += update
    here_s, host_s = optimizer_s(here, costs), host_optimizer_s(elsewhere, costs)
    host_s += host_optimizer_s(on_disk, costs, on_disk=True)
    # The optimizer is started in any case.
    return max(here_s, costs.launch_s) + host_s if host_s else here_s
