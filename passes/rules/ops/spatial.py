"""Rules of pooling, resizing and windows: spatial dims, the last ones, are unsharded; batch and
channels are free."""

import re

from meshfold.passes.rules.ops.labels import BoundOp, Dims, OpLabels, dim_label, numbered, rule


def _num_spatial(op: BoundOp) -> int:
    """2 for "aten.max_pool2d.default"."""
    found = re.search(r"(\d)d", op.target)
    assert found, op.target
    return int(found[1])


def _pool(op: BoundOp) -> OpLabels:
    """x [..., spatial dims]; all results alike."""
    rank = len(op.values[0].shape)
    labels = numbered(op.values[0].shape, but=range(rank - _num_spatial(op), rank))
    return OpLabels((labels,), (labels,) * len(op.outputs))


def _linear_pool(op: BoundOp) -> OpLabels:
    """Means and interpolations."""
    spec = _pool(op)
    return OpLabels(spec.inputs, spec.outputs, linear=(frozenset({0}),))


def _pixel_shuffle(op: BoundOp) -> OpLabels:
    """x [..., c * r * r, h, w] -> [..., c, h * r, w * r], and the way back"""
    batch = numbered(op.values[0].shape[:-3])
    labels = (*batch, dim_label("c"), None, None)
    return OpLabels((labels,), (labels,), linear=(frozenset({0}),))


def _columns(op: BoundOp) -> OpLabels:
    """im2col x [..., c, h, w] -> [..., c * k * k, windows]; col2im is the way back. The channel is
    the highest digit."""
    image, columns = op.values[0].shape, op.outputs[0].shape
    is_back = len(image) < len(columns)
    batch = numbered((columns if is_back else image)[:-3])
    found = (*batch, dim_label("c"), None, None), (*batch, dim_label("c"), None)
    inputs, outputs = reversed(found) if is_back else found
    return OpLabels((inputs,), (outputs,), linear=(frozenset({0}),))


def _unpooled(op: BoundOp) -> OpLabels:
    """max_unpool: values and the places that they had in their image."""
    spec = _pool(op)
    return OpLabels(spec.inputs * 2, spec.outputs, linear=(frozenset({0}),))


def _fractional(op: BoundOp) -> OpLabels | None:
    """fractional_max_pool2d x [n, c, h, w], samples [n, c, 2]"""
    if len(op.values[0].shape) != 4:
        return None
    spec = _pool(op)
    return OpLabels((*spec.inputs, (*spec.inputs[0][:2], None)), spec.outputs)


def _affine_grid(op: BoundOp) -> OpLabels:
    """affine_grid_generator: theta [n, ., .] -> [n, places, their coordinates]; places are
    unsharded."""
    theta, grid = op.values[0].shape, op.outputs[0].shape
    batch: Dims = (dim_label("n"),)
    inputs, outputs = batch + (None,) * (len(theta) - 1), batch + (None,) * (len(grid) - 1)
    return OpLabels((inputs,), (outputs,), linear=(frozenset({0}),))


def _shuffled(op: BoundOp) -> OpLabels:
    """channel_shuffle x [batch, c, ...]: channels unsharded."""
    labels = numbered(op.values[0].shape, but=(1,))
    return OpLabels((labels,), (labels,), linear=(frozenset({0}),))


def _sampled(op: BoundOp) -> OpLabels:
    """grid_sampler: input [n, c, places of it], grid [n, places of the result, their coordinates]
    -> [n, c, places of the result]"""
    places: Dims = tuple(dim_label(f"p{d}") for d in range(len(op.outputs[0].shape) - 2))
    image: Dims = (dim_label("n"), dim_label("c"), *(None,) * len(places))
    out: Dims = (dim_label("n"), dim_label("c"), *places)
    return OpLabels((image, (dim_label("n"), *places, None)), (out,), linear=(frozenset({0}),))


def _windows(op: BoundOp) -> OpLabels:
    """unfold: windows along a dim, which is unsharded, become a last dim."""
    rank = len(op.values[0].shape)
    labels = numbered(op.values[0].shape, but=(op.dim("dimension", rank),))
    return OpLabels((labels,), ((*labels, None),), linear=(frozenset({0}),))


def _overlapped(op: BoundOp) -> OpLabels:
    """unfold_backward: windows, the last dim, are added where they were in `dim`."""
    shape = op.outputs[0].shape
    labels = numbered(shape, but=(op.dim("dim", len(shape)),))
    return OpLabels(((*labels, None),), (labels,), linear=(frozenset({0}),))


_MAX = "self kernel_size stride padding dilation ceil_mode"
_MEAN = "self kernel_size stride padding ceil_mode count_include_pad divisor_override"

SPATIAL_RULES = {
    **{f"aten.max_pool{n}d.default": rule(_MAX, _pool) for n in (1, 2, 3)},
    **{f"aten.max_pool{n}d_with_indices.default": rule(_MAX, _pool) for n in (2, 3)},
    **{f"aten.adaptive_max_pool{n}d.default": rule("self output_size", _pool) for n in (2, 3)},
    **{f"aten.avg_pool{n}d.default": rule(_MEAN, _linear_pool) for n in (1, 2, 3)},
    **{
        f"aten.adaptive_avg_pool{n}d.default": rule("self output_size", _linear_pool)
        for n in (1, 2, 3)
    },
    **{
        f"aten.{name}.vec": rule("input output_size scale_factors", _linear_pool)
        for name in (
            *(f"upsample_nearest{n}d" for n in (1, 2, 3)),
            *(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)),
        )
    },
    **{
        f"aten.{name}.vec": rule("input output_size align_corners scale_factors", _linear_pool)
        for name in (
            *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"),
            *("upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
        )
    },
    "aten.affine_grid_generator.default": rule("theta size align_corners", _affine_grid),
    "aten.fractional_max_pool2d.default": rule(
        "self kernel_size output_size random_samples", _fractional
    ),
    "aten.max_unpool2d.default": rule("self indices output_size", _unpooled),
    "aten.max_unpool3d.default": rule("self indices output_size stride padding", _unpooled),
    "aten.channel_shuffle.default": rule("self groups", _shuffled),
    **{
        f"aten.grid_sampler_{n}d.default": rule(
            "input grid interpolation_mode padding_mode align_corners", _sampled
        )
        for n in (2, 3)
    },
    "aten.im2col.default": rule("self kernel_size dilation padding stride", _columns),
    "aten.col2im.default": rule("self output_size kernel_size dilation padding stride", _columns),
    "aten.unfold.default": rule("self dimension size step", _windows),
    "aten.unfold_backward.default": rule("grad_in input_sizes dim size step", _overlapped),
    "aten.pixel_shuffle.default": rule("self upscale_factor", _pixel_shuffle),
    "aten.pixel_unshuffle.default": rule("self downscale_factor", _pixel_shuffle),
}
