"""Ops of torch.library as users define them, and a model that calls one of them."""

from typing import Any

import torch
from torch import Tensor, nn


@torch.library.custom_op("meshfold_tests::swish", mutates_args=())
def swish(x: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """x sigmoid(x) weight scale."""
    return x * torch.sigmoid(x) * weight * scale


@swish.register_fake
def _swish_shape(x: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.scale = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight = ctx.saved_tensors
    s = torch.sigmoid(x)
    to_weight = (gradient * x * s * ctx.scale).flatten(0, -2).sum(0)
    return gradient * weight * ctx.scale * (s + x * s * (1 - s)), to_weight, None


swish.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("meshfold_tests::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("meshfold_tests::without_backward", mutates_args=())
def without_backward(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("meshfold_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


noisy.register_autograd(lambda ctx, gradient: gradient)


@torch.library.custom_op("meshfold_tests::in_place", mutates_args=("x",))
def in_place(x: Tensor) -> None:
    x.mul_(2)


for _op in (without_backward, noisy):
    _op.register_fake(torch.empty_like)


class Swishing(nn.Module):
    """Two linears with a swish between them; a mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.scale = nn.Parameter(torch.rand(2 * width))
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(swish(self.up(x), self.scale, 0.5))
        return y.square().mean()


def swishing_model() -> tuple[nn.Module, dict[str, Tensor]]:
    """A Swishing in float64 and a batch for it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Swishing(8).double(), {"x": torch.randn(8, 4, 8, dtype=torch.float64)}
