"""One-op graphs of pooling, resizing and sampling of images."""

import torch

from support.graphs.calls import Sample, call
from support.graphs.tensors import real, steps, whole

_PLACES = torch.tensor([[0, 2], [8, 10]]) + torch.tensor([0, 1, 4, 5])[whole(4, 4, 12, 2, 2)]
"""In images of 4 rows of 4, one in each quarter."""

SPATIAL: tuple[Sample, ...] = (
    call("max_pool1d.default", real(12, 12, 6), [2]),
    call("max_pool2d.default", real(4, 12, 6, 6), [3, 3], [2, 2], [1, 1]),
    call("max_pool2d.default", real(12, 4, 4), [2, 2]),
    call("max_pool3d.default", real(4, 12, 4, 4, 4), [2]),
    call("max_pool2d_with_indices.default", real(4, 12, 4, 4), [2, 2], [2, 2]),
    call("max_pool3d_with_indices.default", real(4, 12, 4, 4, 4), [2]),
    call("adaptive_max_pool2d.default", real(4, 12, 6, 6), [2, 3]),
    call("adaptive_max_pool3d.default", real(4, 12, 4, 4, 4), [2, 1, 2]),
    call("avg_pool1d.default", real(12, 12, 6), [2]),
    call("avg_pool2d.default", real(4, 12, 6, 6), [3, 3], [2, 2], [1, 1], False, False),
    call("avg_pool3d.default", real(4, 12, 4, 4, 4), [2]),
    call("adaptive_avg_pool1d.default", real(4, 12, 6), [2]),
    call("adaptive_avg_pool2d.default", real(4, 12, 6, 6), [1, 1]),
    call("adaptive_avg_pool3d.default", real(4, 12, 4, 4, 4), [2, 1, 2]),
    call("upsample_nearest2d.vec", real(4, 12, 3, 3), None, [2.0, 2.0]),
    call("upsample_bilinear2d.vec", real(4, 12, 3, 3), [5, 5], True, None),
    call("upsample_nearest1d.vec", real(4, 12, 3), None, [2.0]),
    call("upsample_nearest3d.vec", real(4, 12, 2, 2, 3), [3, 4, 3], None),
    call("_upsample_nearest_exact1d.vec", real(4, 12, 3), [5], None),
    call("_upsample_nearest_exact2d.vec", real(4, 12, 3, 3), None, [2.0, 2.0]),
    call("_upsample_nearest_exact3d.vec", real(4, 12, 2, 2, 3), [3, 4, 3], None),
    call("upsample_linear1d.vec", real(4, 12, 3), [5], False, None),
    call("upsample_trilinear3d.vec", real(4, 12, 2, 2, 3), [3, 4, 3], True, None),
    call("upsample_bicubic2d.vec", real(4, 12, 3, 3), [5, 5], False, None),
    call("_upsample_bilinear2d_aa.vec", real(4, 12, 6, 6), [4, 3], False, None),
    call("_upsample_bicubic2d_aa.vec", real(4, 12, 6, 6), [4, 3], False, None),
    call("max_unpool2d.default", real(4, 12, 2, 2), _PLACES, [4, 4]),
    call(
        "max_unpool3d.default",
        *(real(4, 12, 2, 1, 1), torch.tensor([[[0]], [[4]]]) + whole(4, 4, 12, 2, 1, 1)),
        *([2, 2, 2], [1, 2, 2], [0, 0, 0]),
    ),
    call("channel_shuffle.default", real(4, 12, 4), 3),
    call("grid_sampler_2d.default", real(4, 12, 5, 5), steps(4, 6, 6, 2), 0, 0, False),
    call("grid_sampler_3d.default", real(4, 12, 3, 3, 3), steps(4, 6, 2, 2, 3), 0, 1, True),
    call("pixel_shuffle.default", real(4, 48, 3, 3), 2),
    call("pixel_unshuffle.default", real(4, 12, 6, 4), 2),
)
