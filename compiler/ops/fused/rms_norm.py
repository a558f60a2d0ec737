"""The op meshfold::rms_norm: root mean square layer normalization (Zhang and Sennrich 2019,
arXiv:1910.07467), which keeps its input as it came and one number a row.

    y = x r w,  r = (mean(x^2) + eps)^-1/2, the mean over the last dim

Models write it out in float32: of a narrow x autograd then keeps a float32 copy and the normalized
rows besides. With g the gradient of y, h = g w and n = x r, the backward is

    dx = r (h - n mean(h n)),   dw = sum over rows of g n

Numbers narrower than float32 are widened inside and rounded once, at the end. On a GPU torch's own
kernel does it, where x and w are of one dtype. Importing this defines the op.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

RMS_NORM = "meshfold.rms_norm.default"


def rms_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """x [..., n] -> [..., n] in its dtype; normalized_shape: [n]; weight [n], of any float."""
    if x.is_cuda and (weight is None or weight.dtype == x.dtype):
        return functional.rms_norm(x, normalized_shape, weight, eps)
    return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return, no-untyped-call]


def wide_dtype(x: Tensor) -> torch.dtype:
    """What rows of x are summed in."""
    return x.dtype if x.dtype.itemsize >= 4 else torch.float32


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        wide = wide_dtype(x)
        rows = x.to(wide)
        inverse = rows.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        y = rows * inverse
        if weight is not None:
            y.mul_(weight.to(wide))
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        normalized = x.to(inverse.dtype) * inverse
        incoming = gradient.to(inverse.dtype)
        of_weight = of_x = None
        if weight is not None:
            if ctx.needs_input_grad[1]:
                rows = (incoming * normalized).reshape(x.shape[:-1].numel(), x.shape[-1])
                of_weight = rows.sum(0).to(weight.dtype)
            incoming = incoming * weight.to(inverse.dtype)
        if ctx.needs_input_grad[0]:
            shared = (incoming * normalized).mean(-1, keepdim=True)
            of_x = (incoming - normalized.mul_(shared)).mul_(inverse).to(x.dtype)
        return of_x, of_weight, None


torch.library.define(
    "meshfold::rms_norm",
    "(Tensor input, int[] normalized_shape, Tensor? weight=None, float eps=0.0) -> Tensor",
)
torch.library.impl("meshfold::rms_norm", "CompositeImplicitAutograd", rms_norm)
