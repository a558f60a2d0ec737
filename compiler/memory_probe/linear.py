"""One probe for all sizes of a linear layer.

x [*, K], weight [N, K] and bias [N] to y [*, N], or the same as a product of matrices with its
weight the other way round (_FORMS): what the op keeps and allocates are whole tensors
of the sizes of x, weight, y and bias. A run on sizes of which each is 16 times the next or more
tells how many of each they are, as digits of a number, and that answers for every size. Layers of
many widths, and one layer on many meshes, then share it.

What is alive at a worst moment is a maximum, and other sizes may have another worst moment: only
where a second run, with the order of the sizes reversed, finds no scratch either is it taken to be
none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from meshfold.cost_models.memory.op_memory import (
    OpProbe,
    ProbedOutput,
    ProbeKey,
    TensorSpec,
    dense_spec,
    is_dense,
)
from meshfold.ir.op_graph import ITEM_BYTES, Ref

_ROWS, _IN, _OUT = 32, 512, 2
"""Elements of x, weight, y, bias: 16,384, 1,024, 64, 2."""

_OTHER_ROWS, _OTHER_IN, _OTHER_OUT = 64, 4, 512
"""Elements of x, weight, y, bias: 256, 2,048, 32,768, 512."""

_BASE = 16


@dataclass(frozen=True, slots=True)
class _Form:
    """How an op takes a linear layer. positions: of x, weight and bias among its operands; turned:
    the weight is [K, N]; most_leading: dims of x before its last, at most. More than five have one
    element in the sample, whose rows are 32."""

    positions: tuple[int, int, int]
    turned: bool
    most_leading: int


_FORMS = MappingProxyType(
    {
        "aten.linear.default": _Form((0, 1, 2), turned=False, most_leading=5),
        "aten.addmm.default": _Form((1, 2, 0), turned=True, most_leading=1),
    }
)


def linear_samples(key: ProbeKey) -> tuple[ProbeKey, ProbeKey] | None:
    """The same call on the two sizes that stand for all; None for another call, for operands that
    are not dense or not of one dtype, and where a dim of one element may take another way."""
    form, operands = _FORMS.get(key.target), key.operands
    refs = tuple(Ref(k) for k in range(len(operands)))
    if form is None or key.kwargs or key.args != refs:
        return None
    ranks = [len(spec.shape) for spec in _by_form(operands, form)]
    if ranks[1:] not in ([2], [2, 1]) or not 2 <= ranks[0] <= form.most_leading + 1:
        return None
    if any(not is_dense(s) or min(s.shape) < 2 or s.dtype != operands[0].dtype for s in operands):
        return None
    samples = (
        _resized(key, form, _ROWS, _IN, _OUT),
        _resized(key, form, _OTHER_ROWS, _OTHER_IN, _OTHER_OUT),
    )
    return None if key in samples else samples


def linear_at_size(answer: OpProbe, key: ProbeKey) -> OpProbe | None:
    """The answer to `key` from that to its first sample; None if it is not made of whole
    tensors."""
    form = _FORMS[key.target]
    x, weight = _by_form(key.operands, form)[:2]
    item_bytes = ITEM_BYTES[x.dtype]
    out = weight.shape[1 if form.turned else 0]
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
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


def _by_form(operands: Sequence[TensorSpec], form: _Form) -> list[TensorSpec]:
    """x, weight and, if there is one, bias."""
    return [operands[k] for k in form.positions if k < len(operands)]


def _resized(key: ProbeKey, form: _Form, rows: int, width: int, out: int) -> ProbeKey:
    """The call on so many rows, from so wide to so wide; leading dims but the last are 2."""
    num_leading = len(key.operands[form.positions[0]].shape) - 1
    leading = (*(2,) * (num_leading - 1), rows >> (num_leading - 1))
    shapes = ((*leading, width), (width, out) if form.turned else (out, width), (out,))
    operands = list(key.operands)
    for k, shape in zip(form.positions, shapes, strict=True):
        if k < len(operands):
            operands[k] = dense_spec(shape, operands[k].dtype, operands[k].requires_grad)
    return replace(key, operands=tuple(operands))


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
