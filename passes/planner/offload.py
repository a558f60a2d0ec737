"""When optimizer states go to the host's memory, and what a plan says of them."""

from dataclasses import replace

from meshfold.cost_models.memory.step_memory import STATE_FACTOR
from meshfold.ir.plan import Plan
from meshfold.ir.strategy import UniformStrategy
from meshfold.passes.memory.zero import program_states
from meshfold.passes.one_pass.priced import Priced
from meshfold.passes.planner.assembly import PlanRequest
from meshfold.passes.planner.find_pipeline import is_pipeline_pinned
from meshfold.units import bytes_text

UNLIMITED_BYTES = 1 << 60
"""More than any device has."""

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


def without_limit(request: PlanRequest) -> PlanRequest:
    """The request for devices of any memory."""
    return replace(request, options=replace(request.options, memory_bytes=UNLIMITED_BYTES))


def why_it_fits(plan: Plan, free: Plan) -> str:
    """What a plan does for memory's sake, and what that costs. free: the plan without_limit."""
    layers = _layers(plan)
    at_host = sum(strategy.offload == "optimizer" for strategy in layers)
    again = sum(strategy.recompute != "none" for strategy in layers)
    more = again > sum(strategy.recompute != "none" for strategy in _layers(free))
    why = ["logits in chunks"] if plan.chunked_loss and not free.chunked_loss else []
    if at_host:
        why.append(f"optimizer states of {at_host} of {len(layers)} layers on the host")
    if more:
        why.append(f"recomputation of {again}")
    return (
        f"fits because: {', '.join(why)}; {plan.step_s / free.step_s - 1:+.1%} on the step of "
        f"{free.strategy.label}, the best on devices of any memory"
    )


def _layers(plan: Plan) -> list[UniformStrategy]:
    """The strategy of every layer."""
    strategies = {region.name: region.strategy for region in plan.regions}
    runs = [run for stage in plan.stages for run in stage.runs]
    return [strategies[run.region] for run in runs for _ in range(run.count)]


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
