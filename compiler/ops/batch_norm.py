"""Batch norm whose statistics are those of the whole batch, of which each rank has a slice.

With count elements per channel over all ranks, x_hat = (x - mean) * rstd and y = x_hat * weight +
bias (Ioffe, Szegedy, 2015), sums over batch and spatial dims of all ranks:

    mean = sum(x) / count      var = sum((x - mean)^2) / count      rstd = 1 / sqrt(var + eps)
    dx = weight * rstd * (dy - sum(dy) / count - x_hat * sum(dy * x_hat) / count)

Two all-reduces of [c] forward, one of [2, c] backward. Two passes, and not a sum of squares, which
loses digits where the mean is large. Gradients of weight and bias are this rank's summand.
"""

from typing import Any

import torch
from torch import Tensor

from meshfold.distributed.rank_mesh import Axes, RankMesh, all_reduced
from meshfold.distributed.step_context import StepContext


def batch_norm(
    context: StepContext,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    axes: Axes,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [n, c, ...] -> y, mean [c], rstd [c] of the batch, new running mean and variance [c].

    axes: those that shard the batch. The running ones are moved by `momentum` towards the batch,
    whose variance counts as that of a sample (divided by count - 1), and are new tensors.
    """
    if not axes:
        # The op saves the statistics for its backward, and buffers change before that.
        statistics = running_mean.clone(), running_var.clone()
        out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
        out = _aten._native_batch_norm_legit_functional.default(
            x, weight, bias, *statistics, True, momentum, eps
        )
        return out
    y, mean, var, rstd = _normalized(context.mesh, x, weight, bias, eps, axes)
    count = _count(context.mesh, x, axes)
    moved_mean = running_mean.lerp(mean.to(running_mean.dtype), momentum)
    sample_var = (var * (count / (count - 1))).to(running_var.dtype)
    return y, mean, rstd, moved_mean, running_var.lerp(sample_var, momentum)


def batch_norm_without_running(
    context: StepContext,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    axes: Axes,
) -> tuple[Tensor, Tensor, Tensor]:
    """batch_norm without running statistics: y, mean, rstd."""
    if not axes:
        out: tuple[Tensor, Tensor, Tensor]
        out = _aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.0, eps)
        return out
    y, mean, _, rstd = _normalized(context.mesh, x, weight, bias, eps, axes)
    return y, mean, rstd


def _normalized(
    mesh: RankMesh, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, axes: Axes
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out: tuple[Tensor, Tensor, Tensor, Tensor]
    out = _BatchNorm.apply(mesh, x, weight, bias, eps, axes)  # type: ignore[no-untyped-call]
    return out


class _BatchNorm(torch.autograd.Function):
    """y, mean, var, rstd; gradients flow through y."""

    @staticmethod
    def forward(
        ctx: Any,
        mesh: RankMesh,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        axes: Axes,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count = _count(mesh, x, axes)
        wide = _widened(x)
        mean = all_reduced(mesh, _summed(wide), axes) / count
        centred = wide - _per_channel(mean, x)
        var = all_reduced(mesh, _summed(centred * centred), axes) / count
        rstd = (var + eps).rsqrt()
        y = centred * _per_channel(rstd if weight is None else rstd * weight, x)
        if bias is not None:
            y = y + _per_channel(bias, x)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.mesh, ctx.axes = mesh, axes
        ctx.mark_non_differentiable(mean, var, rstd)
        return y.to(x.dtype), mean, var, rstd

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        dy = _widened(gradient)
        x_hat = (_widened(x) - _per_channel(mean, x)) * _per_channel(rstd, x)
        for_bias, for_weight = _summed(dy), _summed(dy * x_hat)
        dx = None
        if ctx.needs_input_grad[1]:
            sums = all_reduced(ctx.mesh, torch.stack([for_bias, for_weight]), ctx.axes)
            shift, slope = sums / _count(ctx.mesh, x, ctx.axes)
            dx = dy - _per_channel(shift, x) - x_hat * _per_channel(slope, x)
            dx = dx * _per_channel(rstd if weight is None else rstd * weight, x)
            dx = dx.to(x.dtype)
        wanted = ctx.needs_input_grad
        return (
            None,
            dx,
            for_weight.to(weight.dtype) if wanted[2] else None,
            for_bias.to(gradient.dtype) if wanted[3] else None,
            None,
            None,
        )


def _count(mesh: RankMesh, x: Tensor, axes: Axes) -> int:
    """Elements per channel over the ranks of `axes`, which all hold as many."""
    return x.numel() // x.shape[1] * mesh.size(axes)


def _widened(x: Tensor) -> Tensor:
    """x in float32 or wider, in which statistics are taken."""
    return x if x.dtype.itemsize >= 4 else x.float()


def _summed(x: Tensor) -> Tensor:
    """[n, c, ...] -> [c]"""
    return x.sum((0, *range(2, x.ndim)))


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    """[c] in a shape that broadcasts with x."""
    return values.view(-1, *(1,) * (x.ndim - 2))


_aten = torch.ops.aten
