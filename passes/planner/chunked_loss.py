"""When losses make their logits in chunks, what else is searched where nothing fits, and what a
plan says of it.

Chunks hold less and compute the product of the head once more
(meshfold.passes.split.chunked_losses): the program without them is searched first, the one with
them where nothing fits, or where a pin asks for it.
"""

from collections.abc import Iterator
from dataclasses import replace

from meshfold.errors import InfeasibleError, OptionError
from meshfold.ir.options import CHUNKED_LOSS
from meshfold.ir.plan import Plan
from meshfold.passes.planner import operator_slices
from meshfold.passes.planner.assembly import PlanRequest, model_info
from meshfold.passes.planner.offload import (
    NEEDS_DISK,
    NEEDS_OFFLOAD,
    must_offload,
    offloaded_if_faster,
    with_disk,
    with_offload,
)
from meshfold.passes.planner.states_precision import PlansOf, fastest_states

NEEDS_CHUNKS = "nothing fits with whole logits: losses that make them in chunks were searched, too"


def fitting(asked: PlanRequest, plans_of: PlansOf) -> tuple[Plan, ...]:
    """The plans of what is asked for, the fastest first; with logits in chunks, operators in
    slices, and with offload where nothing fits without. Raises what plans_of raises without."""
    return fastest_states(asked, lambda request: _fitting(request, plans_of))


def _fitting(asked: PlanRequest, plans_of: PlansOf) -> tuple[Plan, ...]:
    """The same for the optimizer that is asked for."""
    request = operator_slices.as_pinned(as_pinned(asked))
    try:
        plans = offloaded_if_faster(request, plans_of(request), plans_of)
        return tuple(named_for(plan, asked, request) for plan in plans)
    except InfeasibleError:
        for wider, notes in wider_requests(request):
            try:
                plans = plans_of(replace(wider, explains=False))
            except (OptionError, InfeasibleError):
                continue
            named = [named_for(plan, asked, wider) for plan in plans]
            return tuple(replace(plan, notes=(*plan.notes, *notes)) for plan in named)
        raise


def wider_requests(request: PlanRequest) -> Iterator[tuple[PlanRequest, tuple[str, ...]]]:
    """What is tried where nothing fits, what costs least time first, with what plans say of it."""
    # The host stores whole parameters.
    can_offload = request.slices == 1
    chunked, offloaded = with_chunks(request), with_offload(request) if can_offload else None
    if not must_offload(request):
        yield from _on_devices(request, chunked)
    if offloaded:
        yield offloaded, (NEEDS_OFFLOAD,)
    if chunked and offloaded and (both := with_offload(chunked)):
        yield both, (NEEDS_CHUNKS, NEEDS_OFFLOAD)
    asked = () if offloaded is None else (NEEDS_OFFLOAD,)
    if can_offload and (on_disk := with_disk(offloaded or request)):
        yield on_disk, (*asked, NEEDS_DISK)


def _on_devices(
    request: PlanRequest, chunked: PlanRequest | None
) -> Iterator[tuple[PlanRequest, tuple[str, ...]]]:
    if chunked:
        yield chunked, (NEEDS_CHUNKS,)
    for sliced in operator_slices.with_slices(request):
        yield sliced, (operator_slices.NEEDS_SLICES,)
    for sliced in operator_slices.with_slices(chunked) if chunked else ():
        yield sliced, (NEEDS_CHUNKS, operator_slices.NEEDS_SLICES)


def with_chunks(request: PlanRequest) -> PlanRequest | None:
    """The request with chunked losses; None where a pin speaks of them, or there are none."""
    if request.options.chunked_loss_pin is not None or request.slices > 1:
        return None
    folded, shared = request.shared.chunked(request.folded)
    if folded is request.folded:
        return None
    return replace(request, folded=folded, shared=shared, chunked_loss=True)


def as_pinned(request: PlanRequest) -> PlanRequest:
    """The request with chunked losses if a pin asks for them. Raises OptionError where there are
    none."""
    if not request.options.chunked_loss_pin:
        return request
    folded, shared = request.shared.chunked(request.folded)
    if folded is request.folded:
        raise OptionError(
            f"pin {CHUNKED_LOSS}=1: no cross entropy of this model is alone in reading what a "
            "linear layer makes; leave it out"
        )
    return replace(request, folded=folded, shared=shared, chunked_loss=True)


def named_for(plan: Plan, asked: PlanRequest, planned: PlanRequest) -> Plan:
    """`plan`, made for `planned`, as one for the model that was asked for."""
    if planned.folded is asked.folded:
        return plan
    info = model_info(asked.folded, asked.model_name, asked.batch_size)
    return replace(plan, chunked_loss=planned.chunked_loss, slices=planned.slices, model=info)
