"""One probe for all sizes of a pointwise op.

What torch tags as pointwise does the same to every element. On dense operands of one shape, what it
keeps and allocates is so many bytes an element: a probe on 2 x 2 x ... elements answers for every
size. Layers of many widths, and one layer on many meshes, then share it.
"""

import math
from dataclasses import replace

import torch

from meshfold.cost_models.memory.op_memory import (
    OpProbe,
    ProbedOutput,
    ProbeKey,
    dense_spec,
    is_dense,
)
from meshfold.ops.registry import torch_target


def pointwise_sample(key: ProbeKey) -> ProbeKey | None:
    """The same call on the fewest elements that stand for all; None where sizes may matter, and
    where there is nothing to gain."""
    if (
        not key.operands
        or key.custom
        or torch.Tag.pointwise not in getattr(torch_target(key.target), "tags", ())
    ):
        return None
    shape = key.operands[0].shape
    if any(spec.shape != shape or not is_dense(spec) for spec in key.operands):
        return None
    small = (2,) * len(shape)
    if 0 in shape or shape == small:
        return None
    operands = tuple(dense_spec(small, s.dtype, s.requires_grad) for s in key.operands)
    return replace(key, operands=operands)


def at_size(answer: OpProbe, key: ProbeKey) -> OpProbe | None:
    """The answer to `key` from that to its sample; None if it is not so many bytes an element."""
    shape = key.operands[0].shape
    small, numel = 1 << len(shape), math.prod(shape)

    def bytes_of(num_bytes: int) -> int:
        return num_bytes // small * numel

    counts = [
        answer.saved_bytes,
        answer.forward_scratch_bytes,
        answer.backward_scratch_bytes,
        *answer.fresh_gradient_bytes,
        *(output.num_bytes for output in answer.outputs),
    ]
    is_alike = all(o.spec.shape == (2,) * len(shape) and is_dense(o.spec) for o in answer.outputs)
    if not is_alike or any(count % small for count in counts):
        return None
    outputs = tuple(
        ProbedOutput(
            dense_spec(shape, o.spec.dtype, o.spec.requires_grad), o.storage, bytes_of(o.num_bytes)
        )
        for o in answer.outputs
    )
    return replace(
        answer,
        outputs=outputs,
        saved_bytes=bytes_of(answer.saved_bytes),
        forward_scratch_bytes=bytes_of(answer.forward_scratch_bytes),
        fresh_gradient_bytes=tuple(map(bytes_of, answer.fresh_gradient_bytes)),
        backward_scratch_bytes=bytes_of(answer.backward_scratch_bytes),
    )
