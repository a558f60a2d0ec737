"""Rules of contractions: dims of the result are labels, what is contracted is a summed label k.

A bias is added to the sum, so where k is sharded it is Partial: one rank adds it.
"""

from meshfold.cost_models.op_costs.einsum import dims_of
from meshfold.passes.rules.ops.labels import (
    BoundOp,
    Dims,
    OpLabels,
    broadcast_dims,
    dim_label,
    numbered,
    rule,
)

_K = frozenset({"k"})


def _linear(op: BoundOp) -> OpLabels | None:
    """x [..., k], weight [o, k] or [k], bias [o]"""
    batch = numbered(op.value("input").shape[:-1])
    if len(op.value("weight").shape) != 2:
        return None
    inputs: list[Dims] = [(*batch, dim_label("k")), (dim_label("o"), dim_label("k"))]
    inputs += [(dim_label("o"),)] * len(op.positions("bias"))
    return OpLabels(
        tuple(inputs),
        ((*batch, dim_label("o")),),
        summed=_K,
        added=frozenset(op.positions("bias")),
        keeps_padding=frozenset({"o"}),
        drops_padding=_K,
    )


def _addmm(op: BoundOp) -> OpLabels:
    """bias broadcast to [m, o], a [m, k], b [k, o]"""
    out: Dims = (dim_label("d0"), dim_label("o"))
    bias = broadcast_dims(op.value("self").shape, op.outputs[0].shape, out)
    inputs = (bias, (dim_label("d0"), dim_label("k")), (dim_label("k"), dim_label("o")))
    return OpLabels(
        inputs,
        (out,),
        summed=_K,
        added=frozenset({0}),
        keeps_padding=frozenset({"o"}),
        drops_padding=_K,
    )


def _baddbmm(op: BoundOp) -> OpLabels:
    """bias broadcast to [b, m, o], a [b, m, k], b [b, k, o]"""
    out: Dims = (dim_label("d0"), dim_label("d1"), dim_label("o"))
    bias = broadcast_dims(op.value("self").shape, op.outputs[0].shape, out)
    inputs = (
        bias,
        (dim_label("d0"), dim_label("d1"), dim_label("k")),
        (dim_label("d0"), dim_label("k"), dim_label("o")),
    )
    return OpLabels(inputs, (out,), summed=_K, added=frozenset({0}))


def _matmul(op: BoundOp) -> OpLabels:
    """a [..., m, k] or [k], b [..., k, o] or [k]; leading dims broadcast. Also mm, bmm, mv and
    dot. Between two tensors of four dims, the second is one of heads."""
    a, b = (v.shape for v in op.values)
    shape = op.outputs[0].shape
    inner = int(len(a) > 1) + int(len(b) > 1)
    batch = numbered(shape[: len(shape) - inner])
    left, right = a[:-2], b[:-2]
    row: Dims = (dim_label("m"),) if len(a) > 1 else ()
    column: Dims = (dim_label("o"),) if len(b) > 1 else ()
    full = shape[: len(batch)]
    inputs = (
        (*broadcast_dims(left, full, batch), *row, dim_label("k")),
        (*broadcast_dims(right, full, batch), dim_label("k"), *column),
    )
    return OpLabels(
        inputs,
        ((*batch, *row, *column),),
        summed=_K,
        heads=frozenset({"d1"}) if len(a) == len(b) == 4 else frozenset(),
        keeps_padding=frozenset({"o", *(label for label, _ in filter(None, batch))}),
        drops_padding=_K,
    )


def _convolution(op: BoundOp) -> OpLabels | None:
    """x [n, k, ...], weight [o, k, ...], bias [o] -> [n, o, ...]; spatial dims unsharded. With
    groups x [n, g, ...], weight [g, ., ...], bias [g] -> [n, g, ...], no group split."""
    return _convolved(op, transposed=False)


def _transposed_convolution(op: BoundOp) -> OpLabels | None:
    """A convolution with weight [k, o, ...], with groups still [g, ., ...]."""
    return _convolved(op, transposed=True)


def _convolved(op: BoundOp, *, transposed: bool) -> OpLabels | None:
    x, weight = op.value("input").shape, op.value("weight").shape
    if len(x) != len(weight):
        return None
    spatial: Dims = (None,) * (len(x) - 2)
    groups = op.integer("groups", 1)
    if groups > 1:
        k = o = dim_label("g")
        channels: Dims = (dim_label("g"), None)
    else:
        k, o = dim_label("k"), dim_label("o")
        channels = (k, o) if transposed else (o, k)
    inputs: list[Dims] = [(dim_label("d0"), k, *spatial), (*channels, *spatial)]
    inputs += [(o,)] * len(op.positions("bias"))
    return OpLabels(
        tuple(inputs),
        ((dim_label("d0"), o, *spatial),),
        summed=_K,
        added=frozenset(op.positions("bias")),
        granularity={"g": groups},
    )


def _einsum(op: BoundOp) -> OpLabels | None:
    """The letters are the labels, capitals behind a "^": I and R are rules that shard nothing.
    Those that the result lacks are summed. A dim of 1 under a letter of more is broadcast; those of
    a diagonal are unsharded."""
    equation = op.get("equation")
    assert isinstance(equation, str)
    letters = dims_of(equation, [v.shape for v in op.values])
    if letters is None:
        return None
    letters = tuple(tuple(f"^{x}" if x.isupper() else x for x in term) for term in letters)
    sizes: dict[str, int] = {}
    for term, value in zip(letters, op.values, strict=False):
        for letter, size in zip(term, value.shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    shapes = [v.shape for v in (*op.values, *op.outputs)]
    diagonal = {letter for term in letters for letter in term if term.count(letter) > 1}
    *inputs, output = (
        tuple(
            dim_label(letter) if size == sizes[letter] and letter not in diagonal else None
            for letter, size in zip(term, shape, strict=True)
        )
        for term, shape in zip(letters, shapes, strict=True)
    )
    return OpLabels(
        tuple(inputs), (output,), summed=frozenset(sizes) - frozenset(letters[-1]) - diagonal
    )


_CONVOLUTION = "input weight bias stride padding dilation groups"
_TRANSPOSED = "input weight bias stride padding output_padding groups dilation"


def _distances(op: BoundOp) -> OpLabels:
    """cdist: x1 [..., p, k], x2 [..., r, k] -> [..., p, r]; k unsharded."""
    shape = op.outputs[0].shape
    batch = numbered(shape[:-2])
    dims = (
        (*broadcast_dims(value.shape[:-2], shape[:-2], batch), dim_label(name), None)
        for value, name in zip(op.values, ("p", "r"), strict=True)
    )
    return OpLabels(tuple(dims), ((*batch, dim_label("p"), dim_label("r")),))


def _trilinear(op: BoundOp) -> OpLabels:
    """The product of three tensors, each with new dims of 1 at `expand`, summed over `sumdim`."""
    full = len(op.outputs[0].shape) + len(summed := op.integers("sumdim"))
    inputs = tuple(
        tuple(dim_label(f"d{d}") for d in range(full) if d not in op.integers(f"expand{k}"))
        for k in (1, 2, 3)
    )
    out = tuple(dim_label(f"d{d}") for d in range(full) if d not in summed)
    return OpLabels(inputs, (out,), summed=frozenset(f"d{d}" for d in summed))


CONTRACTION_RULES = {
    "aten.cdist.default": rule("x1 x2 p compute_mode", _distances),
    "aten._trilinear.default": rule(
        "i1 i2 i3 expand1 expand2 expand3 sumdim unroll_dim", _trilinear
    ),
    "aten.linear.default": rule("input weight bias", _linear),
    "aten.addmm.default": rule("self mat1 mat2 beta alpha", _addmm),
    "aten.baddbmm.default": rule("self batch1 batch2 beta alpha", _baddbmm),
    "aten.mm.default": rule("self mat2", _matmul),
    "aten.bmm.default": rule("self mat2", _matmul),
    "aten.matmul.default": rule("self other", _matmul),
    "aten.mv.default": rule("self vec", _matmul),
    "aten.dot.default": rule("self tensor", _matmul),
    "aten.vdot.default": rule("self other", _matmul),
    "aten.einsum.default": rule("equation tensors path", _einsum),
    **{
        f"aten.conv{n}d.{overload}": rule(_CONVOLUTION, _convolution)
        for n in (1, 2, 3)
        for overload in ("default", "padding")
    },
    "aten.conv_transpose1d.default": rule(_TRANSPOSED, _transposed_convolution),
    "aten.conv_transpose2d.input": rule(_TRANSPOSED, _transposed_convolution),
    "aten.conv_transpose3d.input": rule(_TRANSPOSED, _transposed_convolution),
}
