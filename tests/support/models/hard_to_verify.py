"""Models that a comparison with one process calls wrong too easily."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from support.models.hugging_face import tiny_model

WIDTH = 16
Built = tuple[nn.Module, dict[str, Tensor]]


def _rows(*shape: int) -> dict[str, Tensor]:
    return {"x": torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(0))}


@dataclass
class Output:
    loss: Tensor
    hidden: Tensor


class Encoder(nn.Module):
    """Dropout in attention, and an output of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)

    def forward(self, x: Tensor) -> Output:
        hidden = self.layer(x)
        return Output(hidden.square().mean(), hidden)


def encoder() -> Built:
    return Encoder(), _rows(4, 4)


def after_a_backward() -> Built:
    """A model that already has gradients: its factory ran it."""
    model, batch = encoder()
    model(**batch).loss.backward()
    return model, batch


class Decayed(nn.Module):
    """Reads numbers back from torch, which rounds them to the default dtype, and keeps a table."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.tensor([1 / 3, 0.1] * (WIDTH // 2))
        for rate in torch.linspace(0, 1, 4).tolist():
            x = x + self.layer(x * weights) * (1 - rate)
        return x.square().mean()


def decayed() -> Built:
    return Decayed(), _rows(4, 4)


class Trainer(nn.Module):
    """A wrapper that gives the loss alone, and whose own configuration is of another kind."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.network = nn.ModuleDict({"inner": model})
        self.config = {"learning_rate": 1e-3}

    def forward(self, **batch: Tensor) -> Tensor:
        loss: Tensor = self.network["inner"](**batch).loss
        return loss


def wrapped_experts() -> Built:
    """Their own choice of how experts run has no float64 kernel."""
    model, batch = tiny_model("mixtral")
    model.config._experts_implementation = "grouped_mm"
    return Trainer(model), batch


class ZeroGradients(nn.Module):
    """The gradient of `cancelled` is zero but for rounding; that of `tiny` is as small, and is
    none."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelled = nn.Parameter(torch.ones(WIDTH))
        self.tiny = nn.Parameter(torch.ones(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + self.cancelled
        y = (y - y.mean(0)).square() + 1e-18 * self.tiny * x
        return y.mean()


def zero_gradients() -> Built:
    return ZeroGradients(), _rows(8)


class OddNames(nn.Sequential):
    """Names that are none in Python, and names that are one when dots become underscores."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        for name in ("größe", "数", "a-b"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))
        for name in ("a_b", "self", "context", "float_0", "7"):
            self.register_parameter(name, nn.Parameter(torch.ones(WIDTH)))
        self.a, self.a_b_c = nn.Module(), nn.Linear(WIDTH, WIDTH)
        self.a.b_c = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for name, child in self.named_children():
            x = child.b_c(x) if name == "a" else child(x)
        for parameter in self._parameters.values():
            x = x * parameter
        return x.square().mean()


def odd_names() -> Built:
    return OddNames(), _rows(8)


class Blocks(nn.Module):
    """run: how a block is called."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.run = run
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = self.run(lambda y, block=block: functional.gelu(block(y)), x)
        return x.square().mean()


def _called(function: Callable[..., Tensor], *args: Any) -> Tensor:
    return function(*args)


def _reentrant(function: Callable[..., Tensor], *args: Any) -> Tensor:
    result: Tensor = checkpoint(function, *args, use_reentrant=True)
    return result


def _not_reentrant(function: Callable[..., Tensor], *args: Any) -> Tensor:
    result: Tensor = checkpoint(function, *args, use_reentrant=False)
    return result


def plain_blocks() -> Built:
    return Blocks(_called), _rows(8)


def checkpointed_blocks() -> Built:
    return Blocks(_reentrant), _rows(8)


def recomputed_blocks() -> Built:
    return Blocks(_not_reentrant), _rows(8)


def frozen_half() -> Built:
    model, inputs = recomputed_blocks()
    assert isinstance(model, Blocks)
    model.blocks[:2].requires_grad_(False)
    return model, inputs
