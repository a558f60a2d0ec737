"""More random blocks: what people write beside layers of torch, and models of several outputs.

Kinds of blocks are as in support.models.blocks, [batch, sequence, width] -> alike. Some draw random
numbers whatever the dropout is (`draws`), and one has a rule of the user's (RULES).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from meshfold.capture.custom_ops.register import register_rule
from support.models.blocks import MORE_BLOCKS, Model, Sizes
from support.models.functions import Gelu, RmsNorm
from support.models.library_ops import swish

DROP = 0.25
NUM_EXPERTS, CHOSEN = 4, 2


class DropPath(nn.Module):
    """A residual that is dropped for whole samples, by a mask of Bernoulli draws."""

    draws = True

    def __init__(self, sizes: Sizes, draw: random.Random, dropout: float) -> None:
        super().__init__()
        self.in_place = draw.random() < 0.5
        self.up = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        shape = (x.shape[0], 1, 1)
        if self.in_place:
            keep = x.new_empty(shape).bernoulli_(1 - DROP)
        else:
            keep = torch.bernoulli(torch.full(shape, 1 - DROP, dtype=x.dtype))
        return x + torch.tanh(self.up(x)) * keep / (1 - DROP)


class Padded(nn.Module):
    """Attention over the positions that are no padding, which the first states say."""

    def __init__(self, sizes: Sizes, draw: random.Random, dropout: float) -> None:
        super().__init__()
        self.sizes, self.fill = sizes, draw.random() < 0.5
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        s, rows = self.sizes, x.shape[1]
        heads = self.qkv(x).view(-1, rows, 3, s.heads, s.head_dim).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        kept = (memory[..., 0] > 0) | (torch.arange(rows) == 0)
        mask = kept[:, None, None, :]
        if self.fill:
            scores = query @ key.transpose(-1, -2) / s.head_dim**0.5
            found = scores.masked_fill(~mask, -1e9).softmax(-1) @ value
        else:
            found = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return x + found.transpose(1, 2).flatten(2) * kept[..., None]


class Called(nn.Module):
    """Custom Functions and an op of torch.library between two linears."""

    def __init__(self, sizes: Sizes, draw: random.Random, dropout: float) -> None:
        super().__init__()
        self.how = draw.choice(["gelu", "norm", "library"])
        self.up = nn.Linear(sizes.width, sizes.hidden)
        self.weight = nn.Parameter(torch.ones(sizes.hidden))
        self.down = nn.Linear(sizes.hidden, sizes.width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        y = self.up(x)
        match self.how:
            case "gelu":
                y = Gelu.apply(y) * self.weight
            case "norm":
                y = RmsNorm.apply(y, self.weight, 1e-6)
            case _:
                y = swish(y, self.weight, 0.5)
        return x + self.down(y)


class Product(Function):
    """x [b, s, i], weight [o, i] -> [b, s, o]: a linear layer that probes find as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, 1).T @ x.flatten(0, 1)


class Ruled(nn.Module):
    """A Function whose rule the user gives."""

    def __init__(self, sizes: Sizes, draw: random.Random, dropout: float) -> None:
        super().__init__()
        self.up = nn.Parameter(0.2 * torch.randn(sizes.hidden, sizes.width))
        self.down = nn.Parameter(0.2 * torch.randn(sizes.width, sizes.hidden))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        found: Tensor = Product.apply(torch.relu(Product.apply(x, self.up)), self.down)
        return x + found


class Loop(nn.Module):
    """A loop over experts, each with the rows that chose it."""

    def __init__(self, sizes: Sizes, draw: random.Random, dropout: float) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.width, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(sizes.width, sizes.hidden),
                nn.SiLU(),
                nn.Linear(sizes.hidden, sizes.width),
            )
            for _ in range(NUM_EXPERTS)
        )

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, ids = self.gate(rows).softmax(-1).topk(CHOSEN, -1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            chosen, place = torch.where(ids == number)
            out[chosen] += weights[chosen, place, None] * expert(rows[chosen])
        return x + out.view_as(x)


class Bags(nn.Module):
    """The largest features of a position are looked up together."""

    def __init__(self, sizes: Sizes, draw: random.Random, dropout: float) -> None:
        super().__init__()
        self.mode = draw.choice(["sum", "mean", "max"])
        self.table = nn.EmbeddingBag(sizes.width, sizes.width, mode=self.mode)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        ids = x.topk(2, -1).indices
        return x + self.table(ids.flatten(0, 1)).view_as(x)


class Distances(nn.Module):
    """Nearness to learned points, as weights."""

    def __init__(self, sizes: Sizes, draw: random.Random, dropout: float) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(sizes.hidden, sizes.width))
        self.down = nn.Linear(sizes.hidden, sizes.width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        near = torch.cdist(x, self.points.expand(x.shape[0], -1, -1))
        return x + self.down((-near).softmax(-1))


class Stacked(nn.Module):
    """Recurrences in both directions, of two layers."""

    def __init__(self, sizes: Sizes, draw: random.Random, dropout: float) -> None:
        super().__init__()
        kind = draw.choice([nn.LSTM, nn.GRU])
        self.cells = kind(sizes.width, sizes.head_dim, 2, batch_first=True, bidirectional=True)
        self.down = nn.Linear(2 * sizes.head_dim, sizes.width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + self.down(self.cells(x)[0])


DRAWN_BLOCKS: tuple[Callable[[Sizes, random.Random, float], nn.Module], ...] = (
    *MORE_BLOCKS,
    *(DropPath, Padded, Called, Ruled, Loop, Bags, Distances, Stacked),
)
RULES = (register_rule(Product, "b s i, o i -> b s o"),)


@dataclass
class Outputs:
    """What some models return."""

    loss: Tensor
    logits: Tensor
    count: Tensor


class DrawnModel(Model):
    """A Model of which every layer has a block of DRAWN_BLOCKS. Some divide by how many labels
    count, and return that and the logits, too."""

    def __init__(
        self, sizes: Sizes, draw: random.Random, dropout: float, more: random.Random
    ) -> None:
        super().__init__(sizes, draw, dropout, more, DRAWN_BLOCKS)
        self.has_outputs = more.random() < 0.4
        self.counts = more.random() < 0.3

    @property
    def draws(self) -> bool:
        return any(getattr(block, "draws", False) for block in self.blocks)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.logits(x)
        loss = self.loss_of(logits, labels)
        count = (labels != -100).sum()
        if self.counts:
            loss = functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="none"
            ).sum() / count.clamp(min=1)
        return Outputs(loss, logits, count) if self.has_outputs else loss

    def __str__(self) -> str:
        said = " with outputs" if self.has_outputs else ""
        return super().__str__() + said + (" counted" if self.counts else "")
