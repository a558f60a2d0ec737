"""Rules of complex numbers and Fourier transforms.

A complex tensor is a real one whose last dim, of size 2, is the two parts of a number: no shard
splits it. All but polar coordinates and angles are linear, over the real numbers.
"""

from meshfold.passes.rules.ops.labels import BoundOp, OpLabels, broadcast_dims, numbered, rule

_LINEAR = (frozenset({0}),)


def _joined(op: BoundOp) -> OpLabels:
    """view_as_complex: [..., 2] -> [...]"""
    labels = numbered(op.outputs[0].shape)
    names = frozenset(f"d{d}" for d in range(len(labels)))
    return OpLabels(((*labels, None),), (labels,), linear=_LINEAR, keeps_padding=names)


def _parted(op: BoundOp) -> OpLabels:
    """view_as_real: [...] -> [..., 2]"""
    labels = numbered(op.values[0].shape)
    names = frozenset(f"d{d}" for d in range(len(labels)))
    return OpLabels((labels,), ((*labels, None),), linear=_LINEAR, keeps_padding=names)


def _mirrored(op: BoundOp) -> OpLabels:
    """conj, and the sign that an imaginary part takes from it."""
    labels = numbered(op.values[0].shape)
    names = frozenset(f"d{d}" for d in range(len(labels)))
    return OpLabels((labels,), (labels,), linear=_LINEAR, keeps_padding=names)


def _of_two(op: BoundOp) -> OpLabels:
    """A number of two real ones."""
    shape = op.outputs[0].shape
    labels = numbered(shape)
    inputs = tuple(broadcast_dims(v.shape, shape, labels) for v in op.values)
    linear = (frozenset({0, 1}),) if op.target == "aten.complex.default" else ()
    return OpLabels(inputs, (labels,), linear=linear)


def _angle(op: BoundOp) -> OpLabels:
    labels = numbered(op.values[0].shape)
    return OpLabels((labels,), (labels,))


def _transform(op: BoundOp) -> OpLabels:
    """The dims that are transformed are unsharded, of whatever size they come out."""
    rank = len(op.values[0].shape)
    dims = op.integers("dim")
    if not dims and op.target in _ONE:
        dims = (-1,)
    elif not dims:
        count = 2 if op.target.endswith("2.default") else len(op.integers("s")) or rank
        dims = tuple(range(-count, 0))
    labels = numbered(op.values[0].shape, but=[d % rank for d in dims])
    return OpLabels((labels,), (labels,), linear=_LINEAR)


_ONE = tuple(
    f"aten.fft_{kind}.default" for kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
)
_SEVERAL = tuple(
    f"aten.fft_{kind}{n}.default" for kind in ("fft", "ifft", "rfft", "irfft") for n in ("2", "n")
)
_KERNELS = {"c2c": "forward", "c2r": "last_dim_size", "r2c": "onesided"}
"""Of what torch makes of all others (hfft2, istft), and their last argument."""

COMPLEX_RULES = {
    "aten.view_as_complex.default": rule("self", _joined),
    "aten.view_as_real.default": rule("self", _parted),
    "aten.complex.default": rule("real imag", _of_two),
    "aten.polar.default": rule("abs angle", _of_two),
    "aten._conj.default": rule("self", _mirrored),
    "aten._neg_view.default": rule("self", _mirrored),
    "aten.angle.default": rule("self", _angle),
    **{name: rule("self n dim norm", _transform) for name in _ONE},
    **{name: rule("self s dim norm", _transform) for name in _SEVERAL},
    **{
        f"aten._fft_{kind}.default": rule(f"self dim normalization {last}", _transform)
        for kind, last in _KERNELS.items()
    },
}
