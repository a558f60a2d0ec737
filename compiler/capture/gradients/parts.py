"""Parts of composite ops that a gradient inside of forward goes through.

Torch makes a linear layer of a transposed weight and a product, a convolution of one that takes all
dims, batch norm and attention of kernels whose backward has no backward. Here they are written so
that their backward is ops that have rules, too, and can be taken backward in turn.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from meshfold.torch_compat.autograd_functions import below_autograd
from meshfold.torch_compat.functional_gradients import is_inside_vmap

_aten: Any = torch.ops.aten
Sizes = int | Sequence[int]


class Linear(Function):
    """x [..., k], weight [o, k], bias [o] -> [..., o]"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        ctx.save_for_backward(x, weight)
        with below_autograd():
            return _aten.linear.default(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        x_asked, weight_asked, bias_asked = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            linear(grad, weight.t()) if x_asked else None,
            rows.t() @ x.reshape(-1, x.shape[-1]) if weight_asked else None,
            rows.sum(0) if bias_asked else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if is_inside_vmap():  # which takes no Function
        product = x @ weight.t()
        return product if bias is None else product + bias
    apply: Any = Linear.apply
    found: Tensor = apply(x, weight, bias)
    return found


class Form(NamedTuple):
    """Of a convolution: per spatial dim, but for groups."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int = 1


class Convolution(Function):
    """x [batch, c, ...], weight [o, c / groups, ...], bias [o] -> [batch, o, ...]"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.form = form
        ops = (_aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default)
        with below_autograd():
            return ops[weight.dim() - 3](x, weight, bias, *form)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        x_asked, weight_asked, bias_asked, _ = ctx.needs_input_grad
        return (
            _gradient_of_image(grad, x, weight, ctx.form) if x_asked else None,
            _gradient_of_kernel(grad, x, weight, ctx.form) if weight_asked else None,
            grad.sum((0, *range(2, grad.dim()))) if bias_asked else None,
            None,
        )


def _gradient_of_image(grad: Tensor, x: Tensor, weight: Tensor, form: Form) -> Tensor:
    """The transposed convolution; rows that the convolution left over at the end have none."""
    left = []
    for k, (image, kernel) in enumerate(zip(x.shape[2:], weight.shape[2:], strict=True)):
        reached = (grad.shape[k + 2] - 1) * form.stride[k] + form.dilation[k] * (kernel - 1) + 1
        left.append(image - (reached - 2 * form.padding[k]))
    by_dims: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
    transposed: Callable[..., Tensor] = by_dims[weight.dim() - 3]
    stride, padding, dilation, groups = form
    return transposed(grad, weight, None, stride, padding, left, groups, dilation)


def _gradient_of_kernel(grad: Tensor, x: Tensor, weight: Tensor, form: Form) -> Tensor:
    """The convolution of images with gradients, channels as batch and batch as channels, where
    strides are distances."""
    turned = Form(form.dilation, form.padding, form.stride)
    images, gradients = x.chunk(form.groups, 1), grad.chunk(form.groups, 1)
    found = [
        _convolved(image.transpose(0, 1), over.transpose(0, 1), None, turned).transpose(0, 1)
        for image, over in zip(images, gradients, strict=True)
    ]
    whole = found[0] if len(found) == 1 else torch.cat(found)
    for dim, size in enumerate(weight.shape[2:], 2):
        whole = whole.narrow(dim, 0, size)
    return whole


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> Tensor:
    if is_inside_vmap():
        no_more = [0] * len(form.stride)
        *sizes, groups = form
        whole: Tensor = _aten.convolution.default(x, weight, bias, *sizes, False, no_more, groups)
        return whole
    apply: Any = Convolution.apply
    found: Tensor = apply(x, weight, bias, form)
    return found


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    num_dims = weight.dim() - 2

    def sizes(given: Sizes) -> list[int]:
        found = [given] if isinstance(given, int) else list(given)
        return found * num_dims if len(found) == 1 else found

    if isinstance(padding, str):
        lost = [d * (k - 1) for d, k in zip(sizes(dilation), weight.shape[2:], strict=True)]
        if padding == "valid":
            lost = [0] * num_dims
        if any(size % 2 for size in lost):
            ends = [end for size in reversed(lost) for end in (size // 2, size - size // 2)]
            x, lost = F.pad(x, ends), [0] * num_dims
        padding = [size // 2 for size in lost]
    form = Form(sizes(stride), sizes(padding), sizes(dilation), groups)
    return _convolved(x, weight, bias, form)


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    _cudnn_enabled: bool,
) -> Tensor:
    """x [batch, c, ...]; statistics [c], of the batch in training."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    dims, shape = [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]
    if training or running_mean is None or running_var is None:
        mean = wide.mean(dims)
        centred = wide - mean.view(shape)
        var = (centred * centred).mean(dims)
        if training and running_mean is not None and running_var is not None:
            count = x.numel() // x.shape[1]
            unbiased = var.detach() * (count / max(count - 1, 1))
            for kept, new in ((running_mean, mean.detach()), (running_var, unbiased)):
                kept.copy_(kept * (1 - momentum) + new.to(kept.dtype) * momentum)
    else:
        centred, var = wide - running_mean.view(shape), running_var
    found = centred * torch.rsqrt(var + eps).view(shape)
    if weight is not None:
        found = found * weight.view(shape)
    if bias is not None:
        found = found + bias.view(shape)
    return found.to(x.dtype)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """q [..., l, e], k [..., s, e], v [..., s, o] -> [..., l, o]; a query that may look at nothing
    gets zeros."""
    if enable_gqa:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), torch.finfo(scores.dtype).min)
    elif attn_mask is not None:
        scores = scores + attn_mask
    shares = torch.softmax(scores, -1)
    if attn_mask is not None and attn_mask.dtype is torch.bool and not is_causal:
        shares = shares * attn_mask.any(-1, keepdim=True)
    return torch.dropout(shares, dropout_p, dropout_p > 0) @ v


def _dropout(x: Tensor, p: float, train: bool) -> Any:
    return _aten.native_dropout.default(x, p, train)[0] if train and p else x.clone()


def _log_sigmoid(x: Tensor) -> Tensor:
    """Torch's backward reads exp(-|x|), which it has kept without a gradient."""
    return x.clamp_max(0) - torch.log1p(torch.exp(-x.abs()))


PARTS: Mapping[str, Callable[..., Any]] = {
    "aten.linear.default": linear,
    "aten.log_sigmoid.default": _log_sigmoid,
    "aten.dropout.default": _dropout,
    "aten.batch_norm.default": _batch_norm,
    "aten.scaled_dot_product_attention.default": _attention,
    **{
        f"aten.conv{n}d.{overload}": convolution
        for n in (1, 2, 3)
        for overload in ("default", "padding")
    },
}
"""By the name of the op."""


def is_of_part(node: Any) -> bool:
    """Whether a node of the backward is that of a part, which a graph has as its op."""
    return vars(type(node)).get("_forward_cls") in (Linear, Convolution)
