"""One probe for all sizes of a linear layer.

x [*, K], weight [N, K] and bias [N] to y [*, N]: what the op keeps and allocates are whole tensors
of the sizes of x, weight, y and bias. A run on sizes of which each is 16 times the next or more
tells how many of each they are, as digits of a number, and that answers for every size. Layers of
many widths, and one layer on many meshes, then share it.

What is alive at a worst moment is a maximum, and other sizes may have another worst moment: only
where a second run, with the order of the sizes reversed, finds no scratch either is it taken to be
none.
"""

import math
from dataclasses import replace

from meshfold.cost_models.op_probe import (
    OpProbe,
    ProbedOutput,
    ProbeKey,
    dense_spec,
    is_dense,
)
from meshfold.opgraph import ITEM_BYTES, Ref

_ROWS, _IN, _OUT = 32, 512, 2
"""Elements of x, weight, y, bias: 16,384, 1,024, 64, 2."""

_OTHER_ROWS, _OTHER_IN, _OTHER_OUT = 64, 4, 512
"""Elements of x, weight, y, bias: 256, 2,048, 32,768, 512."""

_BASE = 16


def linear_samples(key: ProbeKey) -> tuple[ProbeKey, ProbeKey] | None:
    """The same call on the two sizes that stand for all; None for another call, for operands that
    are not dense or not of one dtype, and where a dim of one element may take another way."""
    operands = key.operands
    refs = tuple(Ref(k) for k in range(len(operands)))
    if key.target != "aten.linear.default" or key.kwargs or key.args != refs:
        return None
    ranks = [len(spec.shape) for spec in operands]
    # Rows of the sample are 32, so that more than five dims before the last have one element.
    if ranks[1:] not in ([2], [2, 1]) or not 2 <= ranks[0] <= 6:
        return None
    if any(not is_dense(s) or min(s.shape) < 2 or s.dtype != operands[0].dtype for s in operands):
        return None
    samples = (
        _resized(key, _ROWS, _IN, _OUT),
        _resized(key, _OTHER_ROWS, _OTHER_IN, _OTHER_OUT),
    )
    return None if key in samples else samples


def linear_at_size(answer: OpProbe, key: ProbeKey) -> OpProbe | None:
    """The answer to `key` from that to its first sample; None if it is not made of whole
    tensors."""
    x, weight = key.operands[:2]
    item_bytes = ITEM_BYTES[x.dtype]
    rows, width, out = math.prod(x.shape[:-1]), x.shape[-1], weight.shape[0]
    counts = (answer.saved_bytes, *answer.fresh_gradient_bytes)
    if answer.forward_scratch_bytes or answer.backward_scratch_bytes or len(answer.outputs) != 1:
        return None
    (output,) = answer.outputs
    sizes = [_resize(n, item_bytes, (rows, width, out)) for n in (*counts, output.num_bytes)]
    is_alike = math.prod(output.spec.shape) == _ROWS * _OUT and is_dense(output.spec)
    if not is_alike or None in sizes:
        return None
    saved_bytes, *fresh, output_bytes = [n for n in sizes if n is not None]
    spec = dense_spec((*x.shape[:-1], out), output.spec.dtype, output.spec.requires_grad)
    return replace(
        answer,
        outputs=(ProbedOutput(spec, output.storage, output_bytes),),
        saved_bytes=saved_bytes,
        fresh_gradient_bytes=tuple(fresh),
    )


def _resized(key: ProbeKey, rows: int, width: int, out: int) -> ProbeKey:
    """The call on so many rows, from so wide to so wide; leading dims but the last are 2."""
    num_leading = len(key.operands[0].shape) - 1
    leading = (*(2,) * (num_leading - 1), rows >> (num_leading - 1))
    shapes = ((*leading, width), (out, width), (out,))
    operands = tuple(
        dense_spec(shape, spec.dtype, spec.requires_grad)
        for shape, spec in zip(shapes, key.operands, strict=False)
    )
    return replace(key, operands=operands)


def _resize(num_bytes: int, item_bytes: int, size: tuple[int, int, int]) -> int | None:
    """What so many bytes of the first sample are with `size` (rows, K, N); None if they are no
    whole tensors."""
    rest, odd = divmod(num_bytes, item_bytes)
    counts = []
    for numel in _numels(_ROWS, _IN, _OUT):
        count, rest = divmod(rest, numel)
        counts.append(count)
    if odd or rest or max(counts) >= _BASE:
        return None
    return item_bytes * sum(c * n for c, n in zip(counts, _numels(*size), strict=True))


def _numels(rows: int, width: int, out: int) -> tuple[int, int, int, int]:
    """Elements of x, weight, y and bias."""
    return rows * width, out * width, rows * out, out
