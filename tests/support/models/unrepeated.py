"""Models in which less repeats than a pipeline has stages, and a batch for each."""

from itertools import pairwise

import torch
from torch import Tensor, nn

BATCH, SIZE = 4, 8
WIDTHS = (3, 6, 10, 14)
CHANNELS = 8


class Level(nn.Module):
    def __init__(self, source: int, target: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(source, target, 3, padding=1)
        self.norm = nn.GroupNorm(2, target)
        self.second = nn.Conv2d(target, target, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.norm(self.first(x)))))


class UNet(nn.Module):
    """Levels of different widths on the way down and up, joined by skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Level(a, b) for a, b in pairwise(WIDTHS))
        upwards = list(pairwise(WIDTHS[:0:-1]))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in upwards)
        self.joined = nn.ModuleList(Level(2 * b, b) for _, b in upwards)
        self.head = nn.Conv2d(WIDTHS[1], 1, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
            if level is not self.down[-1]:
                x = nn.functional.max_pool2d(x, 2)
        skips.pop()
        for up, level in zip(self.up, self.joined, strict=True):
            x = level(torch.cat([up(x), skips.pop()], dim=1))
        return nn.functional.mse_loss(self.head(x), target)


class Widening(nn.Module):
    """Products of growing width with dropout between, in one region; classes at the end."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        sizes = (6, 10, 14, 18, 22, 26)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(sizes[-1], 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        logits = self.head(x)
        ahead = nn.functional.cross_entropy(logits[:, 1:].flatten(0, 1), labels.flatten())
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten()) + ahead


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.first(x)))


class Residual(nn.Module):
    """A small ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(CHANNELS, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = self.blocks(self.stem(x)).mean((2, 3))
        return nn.functional.cross_entropy(self.head(y), labels)


def unet() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    images = torch.randn(BATCH, WIDTHS[0], SIZE, SIZE, dtype=torch.float64)
    target = torch.randn(BATCH, 1, SIZE, SIZE, dtype=torch.float64)
    return UNet().double(), {"x": images, "target": target}


def widening(dropout: float = 0.0) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(BATCH, 4, 6, dtype=torch.float64)
    labels = torch.randint(0, 5, (BATCH, 3))
    labels[0, 1:], labels[3] = -100, -100
    return Widening(dropout).double(), {"x": x, "labels": labels}


def residual() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    images = torch.randn(BATCH, 3, 6, 6, dtype=torch.float64)
    return Residual().double(), {"x": images, "labels": torch.tensor([0, 2, 1, 2])}


MAKERS = {"unet": unet, "residual": residual}
