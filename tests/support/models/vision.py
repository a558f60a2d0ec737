"""A residual network with batch norm (He et al., 2016, bottleneck blocks), and batches for it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 (with the stride), 1 x 1 to four times the width, beside a shortcut."""

    EXPANSION = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * self.EXPANSION
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(out)
        self.shortcut: nn.Module | None = None
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)), inplace=True)
        y = functional.relu(self.norm2(self.conv2(y)), inplace=True)
        y = self.norm3(self.conv3(y))
        y = y + (x if self.shortcut is None else self.shortcut(x))
        return functional.relu(y, inplace=True)


class ResNet(nn.Module):
    """images [n, 3, h, w], labels [n] -> mean cross entropy. blocks: per stage; width: of the first
    one's bottlenecks, doubled by every stage."""

    def __init__(self, blocks: Sequence[int], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, 2, 1)
        stages, channels = [], width
        for number, count in enumerate(blocks):
            of_stage = []
            for k in range(count):
                stride = 2 if number and not k else 1
                of_stage.append(Bottleneck(channels, width << number, stride))
                channels = (width << number) * Bottleneck.EXPANSION
            stages.append(nn.Sequential(*of_stage))
        self.stages = nn.Sequential(*stages)
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.pool(functional.relu(self.norm(self.stem(images))))
        x = torch.flatten(self.mean(self.stages(x)), 1)
        return functional.cross_entropy(self.head(x), labels)


def resnet50(classes: int = 1000) -> ResNet:
    return ResNet((3, 4, 6, 3), 64, classes)


def images(batch: int, size: int, classes: int, seed: int = 0) -> dict[str, Tensor]:
    """A batch in float64."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "images": torch.randn(batch, 3, size, size, generator=generator, dtype=torch.float64),
        "labels": torch.randint(0, classes, (batch,), generator=generator),
    }


def small_resnet(blocks: Sequence[int] = (2, 1), classes: int = 8) -> ResNet:
    """A model in float64 and training mode, with norms whose weights and statistics are not those
    of a new module."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ResNet(blocks, 4, classes).double()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.uniform_(module.bias, -0.5, 0.5)
                assert module.running_mean is not None
                nn.init.uniform_(module.running_mean, -0.5, 0.5)
    return model
