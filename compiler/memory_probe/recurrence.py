"""Three short probes for a recurrence of any length.

What an LSTM keeps and allocates grows with its steps by the same bytes each. Without storage torch
runs it step by step: on long sequences a probe would take a minute. Three lengths tell whether all
sizes are on a line, and the line answers for every length. At the end of a layer's backward the
gradients of its steps are joined, which is the worst moment of a long one.
"""

from dataclasses import replace

from meshfold.cost_models.memory.op_memory import OpProbe, ProbeKey, TensorSpec, dense_spec
from meshfold.passes.rules.ops.recurrence import RECURRENCES

LENGTHS = (4, 8, 12)
_NUM_LAYERS, _BATCH_FIRST = 4, 8
"""Positions of arguments."""


def recurrence_samples(key: ProbeKey) -> tuple[ProbeKey, ...] | None:
    """The same call on short sequences; None for another call, and for one that is as short."""
    if key.target not in RECURRENCES or len(key.args) <= _BATCH_FIRST:
        return None
    if key.operands[0].shape[_time_dim(key)] <= LENGTHS[-1]:
        return None
    return tuple(_shortened(key, length) for length in LENGTHS)


def at_length(answers: tuple[OpProbe, ...], key: ProbeKey) -> OpProbe | None:
    """The answer to `key` from those to its samples; None where they are on no line."""
    first, second, third = answers
    steps = key.operands[0].shape[_time_dim(key)] - LENGTHS[0]
    between = LENGTHS[1] - LENGTHS[0]

    def grown(one: int, two: int, three: int) -> int:
        if two - one != three - two:
            raise ValueError("not on a line")
        return one + (two - one) * steps // between

    structures = {
        (a.saved_operands, a.saved_outputs, a.gradients, tuple(o.storage for o in a.outputs))
        for a in answers
    }
    if len(structures) > 1:
        return None
    try:
        saved = grown(*(a.saved_bytes for a in answers))
        forward = grown(*(a.forward_scratch_bytes for a in answers))
        backward = grown(*(a.backward_scratch_bytes for a in answers))
        fresh = zip(*(a.fresh_gradient_bytes for a in answers), strict=True)
        outputs = tuple(
            replace(
                of_first,
                spec=_stretched(of_first.spec, key) if k == 0 else of_first.spec,
                num_bytes=grown(of_first.num_bytes, of_second.num_bytes, of_third.num_bytes),
            )
            for k, (of_first, of_second, of_third) in enumerate(
                zip(first.outputs, second.outputs, third.outputs, strict=True)
            )
        )
        gradients = tuple(grown(*of_operand) for of_operand in fresh)
    except ValueError:
        return None
    x = key.operands[0]
    joined = [x.num_bytes] if x.requires_grad else []
    joined += [outputs[0].num_bytes] if key.args[_NUM_LAYERS] != 1 else []
    return replace(
        first,
        outputs=outputs,
        saved_bytes=saved,
        forward_scratch_bytes=forward,
        fresh_gradient_bytes=gradients,
        backward_scratch_bytes=max(backward, *joined, 0),
    )


def _time_dim(key: ProbeKey) -> int:
    return 1 if key.args[_BATCH_FIRST] is True else 0


def _shortened(key: ProbeKey, length: int) -> ProbeKey:
    x = key.operands[0]
    return replace(key, operands=(_with_length(x, _time_dim(key), length), *key.operands[1:]))


def _stretched(spec: TensorSpec, key: ProbeKey) -> TensorSpec:
    dim = _time_dim(key)
    return _with_length(spec, dim, key.operands[0].shape[dim])


def _with_length(spec: TensorSpec, dim: int, length: int) -> TensorSpec:
    """The spec with another number of steps, and dims in the order of memory that it has."""
    shape = tuple(length if d == dim else size for d, size in enumerate(spec.shape))
    order = sorted(range(len(shape)), key=lambda d: -spec.strides[d])
    dense = dense_spec(tuple(shape[d] for d in order), spec.dtype, spec.requires_grad).strides
    strides = tuple(dense[order.index(d)] for d in range(len(shape)))
    return replace(spec, shape=shape, strides=strides)
