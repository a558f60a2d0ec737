"""When optimizer states go to the host's memory, and what a plan says of them."""

from dataclasses import replace

from meshfold.cost_models.memory.step_memory import STATE_FACTOR
from meshfold.passes.memory.zero import program_states
from meshfold.passes.one_pass.priced import Priced
from meshfold.passes.planner.assembly import PlanRequest
from meshfold.passes.planner.find_pipeline import is_pipeline_pinned
from meshfold.units import bytes_text

NEEDS_OFFLOAD = "nothing fits with all optimizer states on the devices: offload was searched, too"


def with_offload(request: PlanRequest) -> PlanRequest | None:
    """The request with optimizer states on the host, all of a pipeline's or those of any layer
    otherwise. None where a pin speaks of it, it was offered already, nothing is known about the
    hosts, or the optimizer has no states."""
    options, cluster = request.options, request.cluster
    is_known = cluster.host_bytes_per_s and cluster.host_memory_bytes_per_s
    if not is_known or not STATE_FACTOR[options.optimizer]:
        return None
    if "offload" in options.pins or options.allow_offload or options.allow_planned:
        return None
    pins = {**options.pins, "offload": "optimizer"}
    if is_pipeline_pinned(options.pins):
        return replace(request, options=replace(options, pins=pins))
    return replace(request, options=replace(options, allow_offload=True))


def within(request: PlanRequest, num_bytes: int) -> PlanRequest:
    """The request for devices with that budget."""
    return replace(request, options=replace(request.options, memory_bytes=num_bytes))


def host_notes(best: Priced, optimizer: str) -> list[str]:
    """What a plan needs of the host's memory, for one device."""
    offloads = [candidate.strategy.offload for candidate in best.candidates]
    layers = sum(offloads[i.region] == "optimizer" for i in best.split.instances)
    if not layers:
        return []
    all_here = program_states(best.split, best.typings, best.mesh)
    left = program_states(best.split, best.typings, best.mesh, offloads)
    # As they are stored, their gradients, and optimizer states.
    num_bytes = (all_here.trained - left.trained) * (2 + STATE_FACTOR[optimizer])
    return [
        f"parameters and optimizer states of {layers} of {len(best.split.instances)} layers are in "
        f"the host's memory: {bytes_text(num_bytes)} of it per device"
    ]
