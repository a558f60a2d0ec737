"""When optimizer states and activations go to the host's memory, and what a plan says of them."""

import math
from collections.abc import Sequence
from dataclasses import replace

from meshfold.cost_models.op_costs.optimizers import has_states, least_share
from meshfold.errors import InfeasibleError, OptionError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.op_graph import ITEM_BYTES
from meshfold.ir.plan import Plan
from meshfold.ir.stage_pins import is_pipeline_pinned
from meshfold.ir.strategy import UPDATED_BY_HOST, Offload
from meshfold.passes.memory.host_use import HostUse
from meshfold.passes.memory.zero import program_states
from meshfold.passes.one_pass.priced import Priced
from meshfold.passes.planner.assembly import PlanRequest
from meshfold.passes.planner.host_note import check_host_memory, stored_notes
from meshfold.passes.planner.states_precision import PlansOf
from meshfold.units import bytes_text

NEEDS_OFFLOAD = "nothing fits with all of it on the devices: offload was searched, too"

PAYS_OFFLOAD = "the memory of the devices slows down what stays on them: offload was searched, too"

NEARLY_FULL = 0.8
"""Share of the memory from which on it decides what a plan is. Chosen: layers, buckets and stages
hold a tenth and more."""

WORTH_STAGES = 0.15
"""What the memory limit has to cost, relative to a step without, for offload to be searched in
stages and microbatches, too, beside a plan that fits. Chosen, so that large clusters, where it
costs up to a tenth, are not searched twice: in one pass, which takes a small part of the time, it
is searched wherever it can gain LEAST_GAIN."""

IN_STAGES = "offload in stages and microbatches"
"""The name of what is left out elsewhere."""

MUCH_OF_STATES = 0.1
"""Share of a device's memory that its part of parameters, gradients and states has to fill for the
same, where that cost is not known. Chosen: less makes no room to speak of."""

LEAST_GAIN = 0.05
"""By how much a plan with offload has to be faster, since it leans on what hosts are asked of.
Chosen."""

NEEDS_DISK = "the host's memory has no room for optimizer states: they were searched on its disk"


def with_offload(request: PlanRequest) -> PlanRequest | None:
    """The request with parameters and optimizer states of any layer on the host, and activations in
    one pass. None where a pin speaks of it, it was offered already, nothing is known about the
    hosts, or a pipeline's optimizer has no states."""
    options, cluster = request.options, request.cluster
    if "offload" in options.pins or options.allow_offload or not cluster.host_bytes_per_s:
        return None
    is_offered = cluster.host_memory_bytes_per_s and has_states(options.optimizer)
    if is_pipeline_pinned(options.pins) and not is_offered:
        return None
    return replace(request, options=replace(options, allow_offload=True))


def must_offload(request: PlanRequest) -> bool:
    """Whether parameters, their gradients and optimizer states alone, sharded over all devices,
    leave no room while offload is not asked for: the device that has most has no less than its
    share."""
    options = request.options
    if options.allow_offload or options.pins.get("offload", "none") != "none":
        return False
    capacity_bytes = options.memory_bytes or request.cluster.budget_bytes
    return request.cluster.reserve_bytes + _sharded_bytes(request) > capacity_bytes


def _sharded_bytes(request: PlanRequest) -> float:
    """Of parameters, their gradients and optimizer states, of one device if all had as much."""
    factor = 2 + least_share(request.options.optimizer)
    total = sum(
        math.prod(p.shape) * ITEM_BYTES[p.dtype] * (factor if p.requires_grad and p.used else 1)
        for p in request.folded.parameters
    )
    return total / request.cluster.num_devices


def offloaded_if_faster(
    request: PlanRequest,
    plans: tuple[Plan, ...],
    plans_of: PlansOf,
) -> tuple[Plan, ...]:
    """`plans`, which fit without offload, or faster ones with it. That is searched where the first
    of them fills the memory and is slow for it."""
    first, offloaded = plans[0], with_offload(request)
    if offloaded is None or not _may_pay(first, request):
        return plans
    if not _pays_in_stages(first):
        if is_pipeline_pinned(request.options.pins):
            return plans
        offloaded = replace(offloaded, in_one_pass=True)
    known_s = max(first.step_s, first.time.step_s)
    try:
        others = plans_of(replace(offloaded, explains=False, beat_s=known_s))
    except (OptionError, InfeasibleError):
        return plans
    if others[0].step_s > (1 - LEAST_GAIN) * first.step_s:
        return plans
    if offloaded.in_one_pass:
        others = tuple(_beside(first, plan) for plan in others)
    return tuple(replace(plan, notes=(*plan.notes, PAYS_OFFLOAD)) for plan in others)


def _beside(first: Plan, plan: Plan) -> Plan:
    """`plan`, of the search in one pass alone, with what the search of `first` has proven of all
    without offload. Left out is counted in choices of that search, which might have offload."""
    earlier = first.search
    stats = replace(
        plan.search,
        lower_bound_s=min(plan.search.lower_bound_s, earlier.lower_bound_s),
        left_out={**earlier.left_out, **plan.search.left_out, IN_STAGES: earlier.num_leaves},
    )
    return replace(plan, search=stats)


def _may_pay(plan: Plan, request: PlanRequest) -> bool:
    if plan.memory.peak < NEARLY_FULL * plan.memory.capacity:
        return False
    if unlimited_s := plan.search.unlimited_s:
        # Nothing that leaves a device makes a step faster than room for all of it does.
        return (1 - LEAST_GAIN) * plan.step_s > unlimited_s
    return _sharded_bytes(request) > MUCH_OF_STATES * plan.memory.capacity


def _pays_in_stages(plan: Plan) -> bool:
    return not plan.search.unlimited_s or plan.memory_costs > WORTH_STAGES


def within(request: PlanRequest, num_bytes: int) -> PlanRequest:
    """The request for devices with that budget."""
    return replace(request, options=replace(request.options, memory_bytes=num_bytes))


def with_disk(request: PlanRequest) -> PlanRequest | None:
    """The request with optimizer states that leave the devices on the disks of the hosts. None
    where offload is not offered or a pin speaks of it, where the host's memory has room for all
    that is known of, or where nothing is known about the disk."""
    options, cluster = request.options, request.cluster
    if "offload" in options.pins or not options.allow_offload or request.states_on_disk:
        return None
    if not cluster.disk_bytes_per_s or not cluster.host_memory_bytes:
        return None
    return replace(request, states_on_disk=True)


def host_notes(best: Priced, optimizer: str, cluster: ClusterSpec) -> list[str]:
    """What a plan needs of the host, for one device. Raises InfeasibleError where its memory is
    known to have no room for that."""
    offloads = [candidate.strategy.offload for candidate in best.candidates]
    leaving = [i.region for i in best.split.instances[:-1] if offloads[i.region] == "activations"]
    if not leaving and not UPDATED_BY_HOST.intersection(offloads):
        return []
    stored = _stored(best, offloads, optimizer)
    saved_bytes = sum(best.candidates[r].memory.saved_bytes for r in leaving)
    check_host_memory(stored + HostUse(saved_bytes), cluster)
    notes = stored_notes([offloads[i.region] for i in best.split.instances], stored)
    if leaving:
        notes.append(
            f"activations of {len(leaving)} of {len(best.split.instances)} layers wait in the "
            f"host's memory for their backward: {bytes_text(saved_bytes)} of it per device"
        )
    return notes


def _stored(best: Priced, offloads: Sequence[Offload], optimizer: str) -> HostUse:
    """Parameters as they are stored, their gradients, and optimizer states."""
    on_disk: list[Offload] = ["disk" if x == "disk" else "none" for x in offloads]
    all_here, left, left_by_disk = (
        program_states(best.split, best.typings, best.mesh, of, optimizer=optimizer)
        for of in (None, offloads, on_disk)
    )
    disk_bytes = all_here.update.state_bytes - left_by_disk.update.state_bytes
    states_bytes = all_here.update.state_bytes - left.update.state_bytes - disk_bytes
    return HostUse(2 * (all_here.trained - left.trained) + states_bytes, disk_bytes)
