"""A model whose layers call custom autograd.Functions, in the ways that people write them."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from meshfold.capture.custom_ops.register import register_rule
from meshfold.ir.custom_ops import CustomRule

ROWS, POSITIONS, WIDTH, CLASSES, DOMAINS = 8, 4, 8, 12, 4


class Reverse(Function):
    """Gradient reversal, of domain-adversarial training."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float) -> Tensor:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.alpha * gradient, None


class Quantize(Function):
    """Straight-through, with setup_context and a second result that has no gradient."""

    @staticmethod
    def forward(x: Tensor, levels: int = 8) -> tuple[Tensor, Tensor]:
        codes = torch.round(x * levels)
        return codes / levels, codes.abs().amax(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, _ = inputs
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 2), None


class Gelu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        return gradient * (0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density)


class RmsNorm(Function):
    """With the gradient of its weight; its statistic lives on the context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight)
        ctx.rstd = rstd
        return x * rstd * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        normal = x * ctx.rstd
        inner = gradient * weight
        mean = (inner * normal).mean(-1, keepdim=True)
        return ctx.rstd * (inner - normal * mean), (gradient * normal).flatten(0, -2).sum(0), None


class LinearLoss(Function):
    """A linear layer and its mean cross entropy, chunk by chunk; gradients are computed in the
    forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        total = x.new_zeros(())
        to_x, to_weight = torch.empty_like(x), torch.zeros_like(weight)
        for start in range(0, x.shape[0], 4):
            part, labels = x[start : start + 4], target[start : start + 4]
            logits = part @ weight.T
            probability = logits.softmax(-1)
            picked = torch.nn.functional.one_hot(labels, weight.shape[0]).to(x.dtype)
            total = total - (logits.log_softmax(-1) * picked).sum()
            slope = probability - picked
            to_x[start : start + 4] = slope @ weight
            to_weight += slope.T @ part
        share = 1 / x.shape[0] if reduction == "mean" else 1.0
        ctx.save_for_backward(to_x * share, to_weight * share)
        return total * share

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        to_x, to_weight = ctx.saved_tensors
        return gradient * to_x, gradient * to_weight, None, None


class Clip(Function):
    """The identity, whose gradient is clipped: its backward is not linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e-3, 1e-3)


class Layer(nn.Module):
    """levels differ by layer or not; gelus is a local class or Gelu."""

    def __init__(self, gelu: type[Function]) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.gelu = gelu

    def forward(self, x: Tensor) -> Tensor:
        y, _ = Quantize.apply(self.up(RmsNorm.apply(x, self.norm, 1e-6)))
        return x + Clip.apply(self.down(self.gelu.apply(y)))


class Stack(nn.Module):
    """Layers, a loss of classes, and one of domains behind a reversed gradient; with reduction
    "none" the latter alone."""

    def __init__(self, num_layers: int, reduction: str, gelu: type[Function]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(gelu) for _ in range(num_layers))
        self.domain = nn.Linear(WIDTH, DOMAINS)
        self.head = nn.Parameter(torch.randn(CLASSES, WIDTH))
        self.reduction = reduction

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        if self.reduction == "none":
            return self.domain(Reverse.apply(x, 0.3)).square().mean()  # type: ignore[no-any-return]
        domains = self.domain(Reverse.apply(x, 0.3)).square().mean()
        rows = x.reshape(-1, WIDTH)
        loss = LinearLoss.apply(rows, self.head, labels.reshape(-1), self.reduction)
        return loss + domains


def local_gelu() -> type[Function]:
    """A Function that no name leads to."""

    class Local(Gelu):
        pass

    return Local


def ruled_functions() -> tuple[nn.Module, dict[str, Tensor], CustomRule]:
    """A factory for commands: a Stack in float32, and the rule that its loss is a sum over rows."""
    model, batch = function_model(2, "sum")
    inputs = {"x": batch["x"].float(), "labels": batch["labels"]}
    return model.float(), inputs, register_rule(LinearLoss, "n _, _ _, n ->")


def function_model(
    num_layers: int = 3, reduction: str = "mean", gelu: type[Function] = Gelu
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A Stack in float64 and a batch for it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Stack(num_layers, reduction, gelu).double()
        x = torch.randn(ROWS, POSITIONS, WIDTH, dtype=torch.float64)
        labels = torch.randint(0, CLASSES, (ROWS, POSITIONS))
    return model, {"x": x, "labels": labels}
