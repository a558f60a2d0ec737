"""MODEL arguments for tests of the command line: small models with their loss inside."""

from typing import Any

import torch
from torch import nn

from support.models.hugging_face import tiny_model, with_padding
from support.models.switch import tiny_switch


class Regression(nn.Module):
    """Two linears and a dropout; what it returns is chosen by the name of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.dropout = nn.Dropout(0.5)
        self.down = nn.Linear(32, 4, bias=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.down(self.dropout(torch.relu(self.up(x))))
        return {"loss": nn.functional.mse_loss(y, target), "y": y}


def regression(batch: int = 8) -> tuple[nn.Module, dict[str, Any]]:
    return Regression(), {"x": torch.randn(batch, 8), "target": torch.randn(batch, 4)}


def unseeded() -> tuple[nn.Module, dict[str, Any]]:
    """Numbers of a generator of its own: other ones in every process."""
    generator = torch.Generator()
    generator.seed()
    x = torch.randn(8, 8, generator=generator)
    return Regression(), {"x": x, "target": torch.randn(1, 4, generator=generator).expand(8, 4)}


def switch() -> tuple[nn.Module, dict[str, Any]]:
    """Experts, one of which nobody chooses: by itself the model leaves it without a gradient."""
    model, batch = tiny_switch()
    return model.float(), batch


def on_meta() -> tuple[nn.Module, dict[str, Any]]:
    with torch.device("meta"):
        return regression()


class Branching(nn.Module):
    """Cannot be captured: it asks a tensor for its value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.sum() > 0:
            y = -y
        return y.sum()


def branching() -> tuple[nn.Module, dict[str, Any]]:
    return Branching(), {"x": torch.randn(8, 8)}


class Classification(Regression):
    """Inputs like those of Regression, another program."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.down(torch.tanh(self.up(x)))
        return {"loss": nn.functional.cross_entropy(y, target)}


def classification(batch: int = 8) -> tuple[nn.Module, dict[str, Any]]:
    return Classification(), {"x": torch.randn(batch, 8), "target": torch.randn(batch, 4)}


def classes(batch: int = 8) -> tuple[nn.Module, dict[str, Any]]:
    """Like classification, with a class per row, of which some do not count."""
    target = torch.arange(batch) % 4
    target[: batch // 4] = -100
    return Classification(), {"x": torch.randn(batch, 8), "target": target}


def ring_llama() -> tuple[nn.Module, dict[str, Any]]:
    model, batch = tiny_model("llama")
    return model, with_padding(batch)


def ring_gpt2() -> tuple[nn.Module, dict[str, Any]]:
    model, batch = tiny_model("gpt2")
    return model, with_padding(batch)


class Deep(nn.Module):
    """A block at four depths: `sharing` says whether it is one that is called ("called"), one in
    several places ("placed"), several with tied parameters ("tied") or without ("none")."""

    def __init__(self, sharing: str = "none") -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        if sharing == "called":
            self.block = DeepBlock()
        else:
            self.blocks = nn.ModuleList(DeepBlock() for _ in range(4))
        if sharing == "placed":
            self.blocks = nn.ModuleList([self.blocks[0]] * 4)
        if sharing == "tied":
            for block in self.blocks[1:]:
                block.up, block.down.weight = self.blocks[0].up, self.blocks[0].down.weight
                block.scale = self.blocks[0].scale
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for k in range(4):
            block: nn.Module = self.block if hasattr(self, "block") else self.blocks[k]
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), target)


class DeepBlock(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.dropout = nn.Dropout(0.1)
        self.down = nn.Linear(32, 16, bias=False)
        self.register_buffer("scale", torch.full((16,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(self.dropout(torch.relu(self.up(x))))


def deep(sharing: str = "none") -> tuple[nn.Module, dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 8, generator=generator)
    return Deep(sharing), {"x": x, "target": torch.arange(8) % 4}


def deep_shared() -> tuple[nn.Module, dict[str, Any]]:
    return deep("called")
