"""When large operators run in slices, and what a plan says of it.

Slices hold less of what ZeRO 3 gathers, and take more launches and smaller collectives
(meshfold.passes.split.operator_slices): the program without them is searched first, those with them
where nothing fits, or where a pin asks for them.
"""

from collections.abc import Iterator
from dataclasses import replace

from meshfold.errors import OptionError
from meshfold.ir.options import SLICES
from meshfold.ir.strategy import UPDATED_BY_HOST
from meshfold.passes.planner.assembly import PlanRequest
from meshfold.passes.price.parameters import BUCKET_BYTES
from meshfold.passes.split.operator_slices import largest_operator_bytes

NEEDS_SLICES = (
    "nothing fits with operators' parameters gathered whole: large operators in slices were "
    "searched, too"
)

COUNTS = (2, 4, 8, 16)
"""Slices of the largest operator that are searched where no pin says how many."""


def with_slices(request: PlanRequest) -> Iterator[PlanRequest]:
    """The request with more and more slices; none where a pin speaks of them, where nothing is
    gathered, and of operators that a bucket holds: smaller ones are not what does not fit."""
    if request.options.slices_pin is not None or request.cluster.num_devices == 1:
        return
    largest = largest_operator_bytes(request.folded)
    for count in COUNTS:
        if largest >= count * BUCKET_BYTES and (sliced := _sliced(request, count)):
            yield sliced


def as_pinned(request: PlanRequest) -> PlanRequest:
    """The request with operators in slices if a pin asks for them. Raises OptionError where none
    can be, and where their parameters would be on the host."""
    count = request.options.slices_pin or 1
    if count == 1:
        return request
    sliced = _sliced(request, count)
    if sliced is None:
        raise OptionError(
            f"pin {SLICES}={count}: no linear layer or embedding of this model has a parameter "
            "that can be sliced so; leave it out"
        )
    pinned = request.options.pins.get("offload")
    if pinned in UPDATED_BY_HOST or request.options.allow_offload:
        raise OptionError(
            f"pin {SLICES}={count}: parameters in slices cannot be on the host; leave it out, or "
            "offload"
        )
    return sliced


def _sliced(request: PlanRequest, count: int) -> PlanRequest | None:
    folded, shared = request.shared.sliced(request.folded, count)
    if folded is request.folded:
        return None
    return replace(request, folded=folded, shared=shared, slices=count)
