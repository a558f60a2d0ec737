"""What memory one step of a conversion takes, as a probe: known without running it."""

import math
from collections.abc import Sequence

from meshfold.cost_models.memory.op_memory import (
    NEW_STORAGE,
    NO_GRADIENT,
    OpProbe,
    ProbedOutput,
    TensorSpec,
)
from meshfold.passes.price.conversions import Step, axis_conversion


def conversion_probe(
    step: Step, sizes: Sequence[int], before: TensorSpec, after: TensorSpec
) -> OpProbe:
    """A conversion keeps nothing. What communicates or cuts makes a new tensor, and a copy of the
    larger end beside it where parts of an inner dim are stacked, or where it is filled up."""
    size = sizes[step.axis]
    there = back = "none"
    if size > 1:
        conversion = axis_conversion(step.source, step.target, size)
        there, back = conversion.forward, conversion.backward
    inner = any(
        t.is_shard and (t.padded or t.blocks > 1 or math.prod(before.shape[: t.dim]) > 1)
        for t in (step.source, step.target)
    )
    scratch = max(before.num_bytes, after.num_bytes) if inner else 0
    stacked = {"all_gather", "reduce_scatter", "all_to_all"}
    makes = there != "none"
    output = ProbedOutput(after, NEW_STORAGE if makes else 0, after.num_bytes if makes else 0)
    if not before.requires_grad:
        gradients: tuple[int, ...] = (NO_GRADIENT,)
    else:
        gradients = (0,) if back == "none" else (1,)
    return OpProbe(
        outputs=(output,),
        forward_scratch_bytes=scratch if there in stacked or step.target.padded else 0,
        gradients=gradients,
        fresh_gradient_bytes=(before.num_bytes,) if gradients == (1,) else (),
        backward_scratch_bytes=scratch if back in stacked and gradients == (1,) else 0,
    )
