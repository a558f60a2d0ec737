"""Pins that ask for stages or microbatches, and pins that rule them out."""

from collections.abc import Mapping

from meshfold.ir.options import (
    CHAINED_CHUNKS,
    COLLECTIVE_MATMUL,
    LAYOUT,
    MICRO_CHUNKS,
    VIRTUAL_STAGES,
    PinValue,
)

SCHEDULE_PINS = ("schedule", VIRTUAL_STAGES)
ONE_PASS_PINS = (MICRO_CHUNKS, CHAINED_CHUNKS, COLLECTIVE_MATMUL)


def is_pipeline_pinned(pins: Mapping[str, PinValue]) -> bool:
    """Whether pins ask for several stages or microbatches, or an order of them."""
    return any(pins.get(name, 1) != 1 for name in ("pp", "microbatches", *SCHEDULE_PINS))


def excludes_pipelines(pins: Mapping[str, PinValue]) -> bool:
    """Whether pins ask for one microbatch, which no stages are worth, or for what stages do not
    do: layouts of parameters among them."""
    is_one = pins.get("microbatches") == 1 or any(pins.get(name) for name in ONE_PASS_PINS)
    is_one |= any(name.startswith(LAYOUT) for name in pins)
    return is_one and not is_pipeline_pinned(pins)
