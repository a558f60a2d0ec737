"""When optimizer states and activations go to the host's memory, and what a plan says of them."""

from dataclasses import replace

from meshfold.cost_models.op_costs.optimizers import has_states
from meshfold.ir.strategy import UPDATED_BY_HOST
from meshfold.passes.memory.zero import program_states
from meshfold.passes.one_pass.priced import Priced
from meshfold.passes.planner.assembly import PlanRequest
from meshfold.passes.planner.find_pipeline import is_pipeline_pinned
from meshfold.passes.planner.host_note import stored_notes
from meshfold.units import bytes_text

NEEDS_OFFLOAD = "nothing fits with all of it on the devices: offload was searched, too"


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


def within(request: PlanRequest, num_bytes: int) -> PlanRequest:
    """The request for devices with that budget."""
    return replace(request, options=replace(request.options, memory_bytes=num_bytes))


def host_notes(best: Priced, optimizer: str) -> list[str]:
    """What a plan needs of the host's memory, for one device."""
    offloads = [candidate.strategy.offload for candidate in best.candidates]
    of = f"of {len(best.split.instances)} layers"
    notes = []
    if UPDATED_BY_HOST.intersection(offloads):
        program = best.split, best.typings, best.mesh
        all_here = program_states(*program, optimizer=optimizer)
        left = program_states(*program, offloads, optimizer=optimizer)
        # As they are stored, their gradients, and optimizer states.
        num_bytes = 2 * (all_here.trained - left.trained)
        num_bytes += all_here.update.state_bytes - left.update.state_bytes
        notes = stored_notes([offloads[i.region] for i in best.split.instances], num_bytes)
    leaving = [i.region for i in best.split.instances[:-1] if offloads[i.region] == "activations"]
    if leaving:
        num_bytes = sum(best.candidates[r].memory.saved_bytes for r in leaving)
        notes.append(
            f"activations of {len(leaving)} {of} wait in the host's memory for their backward: "
            f"{bytes_text(num_bytes)} of it per device"
        )
    return notes
