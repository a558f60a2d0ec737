"""Rules of elementwise ops: every dim of the result is a label; a broadcast dim has none.

Linear: what may be a pending sum. `x + 1` is not linear in x (each rank would add 1), nor is
`x * x` or `1 / x`. Padding is kept by what makes finite numbers of zeros, with finite slopes: that
of a square root is not, and a quotient may divide by a zero beyond the end.
"""

from dataclasses import replace

from meshfold.ir.op_graph import Arg
from meshfold.passes.rules.ops.labels import (
    BoundOp,
    LabelFunction,
    OpLabels,
    broadcast_dims,
    numbered,
    rule,
)


def _pointwise(op: BoundOp, linear: tuple[frozenset[int], ...] = ()) -> OpLabels:
    shape = op.outputs[0].shape
    labels = numbered(shape)
    return OpLabels(
        inputs=tuple(broadcast_dims(v.shape, shape, labels) for v in op.values),
        outputs=(labels,) * len(op.outputs),
        linear=linear,
    )


def _nonlinear(op: BoundOp) -> OpLabels:
    return _pointwise(op)


def _linear_unary(op: BoundOp) -> OpLabels:
    return _pointwise(op, (frozenset({0}),))


def _cast(op: BoundOp) -> OpLabels:
    """A cast is linear between floats only."""
    return _linear_unary(op) if op.values[0].is_float else _pointwise(op)


def _sum_of_two(op: BoundOp) -> OpLabels:
    """add, sub: linear in both together; adding a number is not linear."""
    both = op.has_tensor("self") and op.has_tensor("other")
    return _pointwise(op, (frozenset({0, 1}),) if both else ())


def _product(op: BoundOp) -> OpLabels:
    """mul: linear in either factor."""
    return _pointwise(op, tuple(frozenset({k}) for k in range(len(op.values))))


def _quotient(op: BoundOp) -> OpLabels:
    """div: linear in the numerator, unless the result is rounded."""
    linear = op.has_tensor("self") and op.get("rounding_mode") is None
    return _pointwise(op, (frozenset({0}),) if linear else ())


def _sum_and_product(op: BoundOp) -> OpLabels:
    """addcmul, addcdiv: linear in the sum together with a factor, not with a divisor."""
    factors = (1, 2) if op.target == "aten.addcmul.default" else (1,)
    return _pointwise(op, tuple(frozenset({0, k}) for k in factors))


def _between(op: BoundOp) -> OpLabels:
    """lerp: linear in both ends together."""
    return _pointwise(op, (frozenset({0, 1}),))


def _is_zero(number: Arg) -> bool:
    return isinstance(number, int | float) and number == 0


def _choice(op: BoundOp) -> OpLabels:
    """where: linear in the chosen values together, if each is a tensor or zero."""
    tensors = frozenset(k for name in ("self", "other") for k in op.positions(name))
    linear = all(op.has_tensor(name) or _is_zero(op.get(name)) for name in ("self", "other"))
    return _chosen(_pointwise(op, (tensors,) if linear and tensors else ()), op, "condition")


def _filled(op: BoundOp) -> OpLabels:
    """masked_fill: linear if what is filled in is zero."""
    found = _pointwise(op, (frozenset({0}),) if _is_zero(op.get("value")) else ())
    return _chosen(found, op, "mask")


def _chosen(found: OpLabels, op: BoundOp, flags: str) -> OpLabels:
    """Padding is kept where the flags do not have the dim: what they choose beyond the end is what
    they choose before it. Others could fill a row there, and leave a softmax nothing."""
    carried = found.inputs[op.position(flags)]
    return replace(found, keeps_padding=frozenset(found.names) - {p[0] for p in carried if p})


def _gated(op: BoundOp) -> OpLabels:
    """act(gate) * x: linear in x, and zeros times zeros beyond the end."""
    found = _pointwise(op, (frozenset({1}),))
    return replace(found, keeps_padding=frozenset(found.names))


def _bucketed(op: BoundOp) -> OpLabels:
    """bucketize, isin: every rank looks through all boundaries, or elements."""
    labels = numbered(op.outputs[0].shape)
    return OpLabels((labels, (None,) * len(op.values[1].shape)), (labels,))


def _searched(op: BoundOp) -> OpLabels | None:
    """searchsorted: the boundaries of a row are unsharded; one row may be for all."""
    if op.has_tensor("sorter"):
        return None
    labels = numbered(op.outputs[0].shape)
    rank = len(op.value("sorted_sequence").shape)
    return OpLabels((((None,) if rank == 1 else (*labels[:-1], None)), labels), (labels,))


def _padded(labels: LabelFunction) -> LabelFunction:
    """The same labels, for an op that keeps padding."""

    def padded(op: BoundOp) -> OpLabels | None:
        found = labels(op)
        assert found is not None
        return replace(found, keeps_padding=frozenset(found.names))

    return padded


def _scaled(op: BoundOp) -> OpLabels:
    """div keeps padding where it divides by a number."""
    found = _quotient(op)
    by_number = not op.has_tensor("other")
    return replace(found, keeps_padding=frozenset(found.names)) if by_number else found


_LIKE = "self dtype layout device pin_memory memory_format"
_CAST = "self dtype layout device pin_memory non_blocking memory_format"

_ROWS: dict[str, tuple[str, LabelFunction]] = {
    "neg.default": ("self", _padded(_linear_unary)),
    "alias.default": ("self", _padded(_linear_unary)),
    "detach.default": ("self", _padded(_linear_unary)),
    "lift_fresh_copy.default": ("self", _padded(_linear_unary)),
    "clone.default": ("self memory_format", _padded(_linear_unary)),
    "contiguous.default": ("self memory_format", _padded(_linear_unary)),
    "_to_copy.default": (_CAST, _padded(_cast)),
    "add.Tensor": ("self other alpha", _padded(_sum_of_two)),
    "sub.Tensor": ("self other alpha", _padded(_sum_of_two)),
    "add.Scalar": ("self other alpha", _padded(_nonlinear)),
    "sub.Scalar": ("self other alpha", _padded(_nonlinear)),
    "rsub.Scalar": ("self other alpha", _nonlinear),
    "mul.Tensor": ("self other", _padded(_product)),
    "mul.Scalar": ("self other", _padded(_product)),
    "div.Tensor": ("self other", _scaled),
    "div.Scalar": ("self other", _padded(_linear_unary)),
    "addcmul.default": ("self tensor1 tensor2 value", _sum_and_product),
    "addcdiv.default": ("self tensor1 tensor2 value", _sum_and_product),
    "lerp.Scalar": ("self end weight", _between),
    "lerp.Tensor": ("self end weight", _between),
    "div.Tensor_mode": ("self other rounding_mode", _quotient),
    "where.self": ("condition self other", _choice),
    "where.ScalarOther": ("condition self other", _choice),
    "where.ScalarSelf": ("condition self other", _choice),
    "where.Scalar": ("condition self other", _choice),
    "masked_fill.Scalar": ("self mask value", _filled),
    "masked_fill.Tensor": ("self mask value", _nonlinear),
    "pow.Tensor_Scalar": ("self exponent", _nonlinear),
    "pow.Tensor_Tensor": ("self exponent", _nonlinear),
    "pow.Scalar": ("self exponent", _nonlinear),
    "rsub.Tensor": ("self other alpha", _sum_of_two),
    "polygamma.default": ("n self", _nonlinear),
    "_prelu_kernel.default": ("self weight", _nonlinear),
    "isin.Tensor_Tensor": ("elements test_elements assume_unique invert", _bucketed),
    "searchsorted.Tensor": ("sorted_sequence self out_int32 right side sorter", _searched),
    "frexp.Tensor": ("self", _nonlinear),
    "round.decimals": ("self decimals", _nonlinear),
    "mvlgamma.default": ("self p", _nonlinear),
    "heaviside.default": ("self values", _nonlinear),
    "special_zeta.default": ("self other", _nonlinear),
    "special_zeta.other_scalar": ("self other", _nonlinear),
    "bucketize.Tensor": ("self boundaries out_int32 right", _bucketed),
    "gelu.default": ("self approximate", _nonlinear),
    "clamp.default": ("self min max", _nonlinear),
    "clamp.Tensor": ("self min max", _nonlinear),
    "clamp_min.Tensor": ("self min", _nonlinear),
    "clamp_max.Tensor": ("self max", _nonlinear),
    "clamp_min.default": ("self min", _nonlinear),
    "clamp_max.default": ("self max", _nonlinear),
    "leaky_relu.default": ("self negative_slope", _nonlinear),
    "softplus.default": ("self beta threshold", _nonlinear),
    "hardtanh.default": ("self min_val max_val", _nonlinear),
    "elu.default": ("self alpha scale input_scale", _nonlinear),
    "celu.default": ("self alpha", _nonlinear),
    "threshold.default": ("self threshold value", _nonlinear),
    "logit.default": ("self eps", _nonlinear),
    "nan_to_num.default": ("self nan posinf neginf", _nonlinear),
    "fill.Scalar": ("self value", _nonlinear),
    "fill.Tensor": ("self value", _nonlinear),
    "copy.default": ("self src non_blocking", _nonlinear),
    "zeros_like.default": (_LIKE, _nonlinear),
    "ones_like.default": (_LIKE, _nonlinear),
    "full_like.default": (_LIKE.replace("self", "self fill_value"), _nonlinear),
}

UNARY = (
    "abs acos acosh asin asinh atan atanh bitwise_not ceil cos cosh deg2rad digamma erf erfc "
    "erfinv exp exp2 expm1 floor frac hardsigmoid hardswish i0 isfinite isinf isnan isneginf "
    "isposinf lgamma log log10 log1p log2 log_sigmoid logical_not mish rad2deg reciprocal relu "
    "relu6 round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh special_entr "
    "special_erfcx special_i1 special_i1e special_log_ndtr special_ndtr special_ndtri sqrt square "
    "tan tanh trunc"
).split()
BINARY = (
    "__and__.Tensor __or__.Tensor __xor__.Tensor bitwise_and.Tensor bitwise_or.Tensor "
    "bitwise_xor.Tensor logical_and.default logical_or.default logical_xor.default eq.Tensor "
    "ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor eq.Scalar ne.Scalar lt.Scalar le.Scalar "
    "gt.Scalar ge.Scalar __and__.Scalar __or__.Scalar bitwise_and.Scalar bitwise_or.Scalar "
    "maximum.default minimum.default max.other min.other remainder.Tensor remainder.Scalar "
    "fmod.Tensor fmod.Scalar floor_divide.default atan2.default copysign.Tensor "
    "bitwise_left_shift.Tensor bitwise_right_shift.Tensor gcd.default lcm.default ldexp.Tensor "
    "fmax.default fmin.default hypot.default logaddexp.default logaddexp2.default "
    "nextafter.default special_xlog1py.default xlogy.Tensor"
).split()

POINTWISE_RULES = {
    **{f"aten.{name}": rule(names, labels) for name, (names, labels) in _ROWS.items()},
    **{f"aten.{name}.default": rule("self", _nonlinear) for name in UNARY},
    "aten.tanh.default": rule("self", _padded(_nonlinear)),
    "meshfold.gated_product.default": rule("gate x activation", _gated),
    **{f"aten.{name}": rule("self other", _nonlinear) for name in BINARY},
}
