"""One-op graphs of complex numbers and Fourier transforms, and of windows of images."""

import torch
from torch import Tensor

from support.graphs.calls import Sample, call
from support.graphs.tensors import real


def complex_of(*shape: int) -> Tensor:
    """Numbers of which neither part is near zero."""
    with torch.no_grad():
        x = torch.complex(real(*shape), real(*shape, seed=8))
    return x.requires_grad_()


COMPLEX: tuple[Sample, ...] = (
    call("view_as_complex.default", real(4, 12, 2)),
    call("view_as_real.default", complex_of(4, 12)),
    call("complex.default", real(4, 12), real(4, 12, seed=8)),
    call("polar.default", real(4, 12), real(4, 12, seed=8)),
    call("_conj.default", complex_of(4, 12)),
    call("_neg_view.default", real(4, 12)),
    call("angle.default", complex_of(4, 12)),
    call("mul.Tensor", complex_of(4, 12, 6), complex_of(12, 1)),
    call("abs.default", complex_of(4, 12)),
    call("fft_fft.default", real(4, 12, 6), None, 1),
    call("fft_fft.default", complex_of(4, 12)),
    call("fft_ifft.default", complex_of(4, 12, 6), None, -2, "ortho"),
    call("fft_rfft.default", real(4, 12, 6)),
    call("fft_irfft.default", complex_of(4, 12, 4), 6),
    call("fft_hfft.default", complex_of(4, 12, 4), 6),
    call("fft_ihfft.default", real(4, 12, 6)),
    call("_fft_c2c.default", complex_of(4, 12, 4, 6), [2, 3], 0, True),
    call("_fft_c2r.default", complex_of(4, 12, 4), [2], 0, 6),
    call("_fft_r2c.default", real(4, 6, 12), [1], 1, True),
    call("fft_fft2.default", real(4, 12, 4, 6)),
    call("fft_ifft2.default", complex_of(4, 4, 6, 12), None, [1, 2]),
    call("fft_rfft2.default", real(4, 4, 6, 12), None, [1, 2], "ortho"),
    call("fft_irfft2.default", complex_of(4, 12, 4, 6), [4, 8]),
    call("fft_fftn.default", complex_of(4, 12, 6), None, [0, 2]),
    call("fft_fftn.default", real(4, 12), None),
    call("fft_ifftn.default", complex_of(4, 12, 6), [6]),
    call("fft_rfftn.default", real(4, 12, 6), None, [1]),
    call("fft_irfftn.default", complex_of(4, 12, 6), [12, 6], [1, 2]),
)

WINDOWS: tuple[Sample, ...] = (
    call("im2col.default", real(4, 12, 5, 6), [2, 3], [1, 1], [1, 0], [2, 1]),
    call("im2col.default", real(12, 5, 6), [2, 2], [1, 1], [0, 0], [2, 2]),
    call("col2im.default", real(4, 72, 8), [5, 4], [2, 3], [1, 1], [0, 0], [1, 1]),
    call("unfold.default", real(4, 12, 6), 1, 3, 2),
    call("unfold.default", real(4, 12, 6), -1, 2, 2),
    call("cdist.default", real(4, 12, 3), real(4, 6, 3, seed=8)),
    call("cdist.default", real(12, 3), real(4, 6, 3, seed=8), 1.0),
)
