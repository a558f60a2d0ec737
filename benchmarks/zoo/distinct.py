"""A model of layers that are all different, each of its own width: nothing in it folds."""

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 256
TOKENS = 512
CLASSES = 1024


class Block(nn.Module):
    """Norm, linear to `inner`, gelu, linear back, beside a shortcut."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return x + y


class Distinct(nn.Module):
    """x [tokens, width], labels [tokens] -> mean cross entropy. Inner widths differ by 16."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH + 16 * k) for k in range(num_layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x), labels)


def distinct_model(num_layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and a batch for it, without storage."""
    with torch.device("meta"):
        x, labels = torch.empty(TOKENS, WIDTH), torch.empty(TOKENS, dtype=torch.long)
        return Distinct(num_layers), {"x": x, "labels": labels}
