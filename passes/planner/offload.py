"""When optimizer states and activations go to the host's memory, and what a plan says of them."""

from dataclasses import replace

from meshfold.cost_models.op_costs.optimizers import has_states
from meshfold.passes.memory.zero import program_states
from meshfold.passes.one_pass.priced import Priced
from meshfold.passes.planner.assembly import PlanRequest
from meshfold.passes.planner.find_pipeline import is_pipeline_pinned
from meshfold.units import bytes_text

NEEDS_OFFLOAD = "nothing fits with all of it on the devices: offload was searched, too"


def with_offload(request: PlanRequest) -> PlanRequest | None:
    """The request with optimizer states on the host, all of a pipeline's, or those and activations
    of any layer otherwise. None where a pin speaks of it, it was offered already, nothing is known
    about the hosts, or a pipeline's optimizer has no states."""
    options, cluster = request.options, request.cluster
    if "offload" in options.pins or options.allow_offload or not cluster.host_bytes_per_s:
        return None
    if is_pipeline_pinned(options.pins):
        if not cluster.host_memory_bytes_per_s or not has_states(options.optimizer):
            return None
        pins = {**options.pins, "offload": "optimizer"}
        return replace(request, options=replace(options, pins=pins))
    return replace(request, options=replace(options, allow_offload=True))


def within(request: PlanRequest, num_bytes: int) -> PlanRequest:
    """The request for devices with that budget."""
    return replace(request, options=replace(request.options, memory_bytes=num_bytes))


def host_notes(best: Priced, optimizer: str) -> list[str]:
    """What a plan needs of the host's memory, for one device."""
    offloads = [candidate.strategy.offload for candidate in best.candidates]
    layers = sum(offloads[i.region] == "optimizer" for i in best.split.instances)
    of = f"of {len(best.split.instances)} layers"
    notes = []
    if layers:
        program = best.split, best.typings, best.mesh
        all_here = program_states(*program, optimizer=optimizer)
        left = program_states(*program, offloads, optimizer=optimizer)
        # As they are stored, their gradients, and optimizer states.
        num_bytes = 2 * (all_here.trained - left.trained)
        num_bytes += all_here.update.state_bytes - left.update.state_bytes
        notes.append(
            f"parameters and optimizer states of {layers} {of} are in the host's memory: "
            f"{bytes_text(num_bytes)} of it per device"
        )
    leaving = [i.region for i in best.split.instances[:-1] if offloads[i.region] == "activations"]
    if leaving:
        num_bytes = sum(best.candidates[r].memory.saved_bytes for r in leaving)
        notes.append(
            f"activations of {len(leaving)} {of} wait in the host's memory for their backward: "
            f"{bytes_text(num_bytes)} of it per device"
        )
    return notes
