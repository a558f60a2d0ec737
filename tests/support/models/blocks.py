"""Random models of blocks, which map [batch, sequence, width] and the first states to states."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Sizes:
    """The sizes of one model. key_heads divides heads, heads divides width."""

    batch: int
    sequence: int
    heads: int
    key_heads: int
    head_dim: int
    hidden: int
    vocabulary: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


class Attention(nn.Module):
    """Grouped queries, causal or not; over `memory` if there is one."""

    def __init__(self, sizes: Sizes, *, causal: bool, dropout: float, plain: bool) -> None:
        super().__init__()
        self.sizes, self.causal, self.dropout, self.plain = sizes, causal, dropout, plain
        self.query = nn.Linear(sizes.width, sizes.width)
        self.key = nn.Linear(sizes.width, sizes.key_heads * sizes.head_dim, bias=False)
        self.value = nn.Linear(sizes.width, sizes.key_heads * sizes.head_dim)
        self.out = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        s = self.sizes
        rows, source = x.shape[1], memory
        query = self.query(x).view(-1, rows, s.heads, s.head_dim).transpose(1, 2)
        key, value = (
            p(source).view(-1, source.shape[1], s.key_heads, s.head_dim).transpose(1, 2)
            for p in (self.key, self.value)
        )
        if s.key_heads != s.heads and self.plain:
            key, value = (t.repeat_interleave(s.heads // s.key_heads, 1) for t in (key, value))
        if self.plain:
            scores = query @ key.transpose(-1, -2) / s.head_dim**0.5
            if self.causal:
                hidden = torch.ones(rows, rows, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(hidden, float("-inf"))
            found = scores.softmax(-1) @ value
        else:
            found = functional.scaled_dot_product_attention(
                query,
                key,
                value,
                dropout_p=self.dropout if self.training else 0.0,
                is_causal=self.causal,
                enable_gqa=s.key_heads != s.heads,
            )
        return self.out(found.transpose(1, 2).reshape(-1, rows, s.width))


class SelfAttention(nn.Module):
    def __init__(self, sizes: Sizes, draw: random.Random, dropout: float) -> None:
        super().__init__()
        self.norm = draw.choice([nn.LayerNorm, nn.RMSNorm])(sizes.width)
        plain = draw.random() < 0.5
        self.attention = Attention(
            sizes, causal=draw.random() < 0.5, dropout=0.0 if plain else dropout, plain=plain
        )

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y, y)


class CrossAttention(nn.Module):
    """Looks at the first hidden states, as a decoder at its encoder."""

    def __init__(self, sizes: Sizes, draw: random.Random, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes, causal=False, dropout=dropout, plain=False)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + self.attention(self.norm(x), memory)


class FusedAttention(nn.Module):
    """One product for q, k and v, split up by chunk or by a view."""

    def __init__(self, sizes: Sizes, draw: random.Random, dropout: float) -> None:
        super().__init__()
        self.sizes, self.by_view = sizes, draw.random() < 0.5
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        s, rows = self.sizes, x.shape[1]
        if self.by_view:
            qkv = self.qkv(x).view(-1, rows, 3, s.heads, s.head_dim).permute(2, 0, 3, 1, 4)
            query, key, value = qkv.unbind(0)
        else:
            query, key, value = (
                t.view(-1, rows, s.heads, s.head_dim).transpose(1, 2)
                for t in self.qkv(x).chunk(3, -1)
            )
        found = functional.scaled_dot_product_attention(query, key, value)
        return x + self.out(found.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, sizes: Sizes, draw: random.Random, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(sizes.width, sizes.hidden)
        self.gate = (
            nn.Linear(sizes.width, sizes.hidden, bias=False) if draw.random() < 0.5 else None
        )
        self.down = nn.Linear(sizes.hidden, sizes.width)
        self.act = draw.choice([nn.GELU, nn.SiLU, nn.ReLU, nn.Tanh])()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        y = self.act(self.up(x))
        if self.gate is not None:
            y = y * self.gate(x)
        return x + self.dropout(self.down(y))


class Experts(nn.Module):
    """The best experts of each token by their weight, the others weighted zero."""

    def __init__(self, sizes: Sizes, draw: random.Random, dropout: float) -> None:
        super().__init__()
        self.num, self.best = draw.choice([(3, 1), (4, 2), (6, 2)])
        self.router = nn.Linear(sizes.width, self.num)
        self.up = nn.Parameter(torch.randn(self.num, sizes.width, sizes.hidden) * 0.2)
        self.down = nn.Parameter(torch.randn(self.num, sizes.hidden, sizes.width) * 0.2)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(self.best, -1)
        share = torch.zeros(*x.shape[:-1], self.num, dtype=x.dtype).scatter(-1, ids, weights)
        y = torch.einsum("bsd,edh->besh", x, self.up).relu()
        return x + torch.einsum("besh,ehd,bse->bsd", y, self.down, share)


class Convolution(nn.Module):
    """Along the sequence, plain or by channel, with batch norm or group norm."""

    def __init__(self, sizes: Sizes, draw: random.Random, dropout: float) -> None:
        super().__init__()
        groups = draw.choice([1, sizes.heads, sizes.width])
        self.conv = nn.Conv1d(sizes.width, sizes.width, 3, padding=1, groups=groups)
        self.norm = draw.choice(
            [nn.BatchNorm1d(sizes.width), nn.GroupNorm(sizes.heads, sizes.width)]
        )

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2).sigmoid()


class Mixing(nn.Module):
    """Moves data about: rolls, halves that change places, sums along the sequence, pooling."""

    def __init__(self, sizes: Sizes, draw: random.Random, dropout: float) -> None:
        super().__init__()
        self.how = draw.choice(["roll", "halves", "cumsum", "pool", "last", "outer"])
        self.scale = nn.Parameter(torch.ones(sizes.width))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        match self.how:
            case "roll":
                y = x.roll(1, 1)
            case "halves":
                left, right = x.split((x.shape[-1] // 2, x.shape[-1] - x.shape[-1] // 2), -1)
                y = torch.cat([-right, left], -1)
            case "cumsum":
                y = x.cumsum(1) / x.shape[1]
            case "pool":
                y = x.mean(1, keepdim=True).expand_as(x)
            case "last":
                y = x[:, -1:].sigmoid() * x
            case _:
                y = torch.einsum("bsd,btd->bst", x, memory).softmax(-1) @ memory
        return x + self.scale * y


class Gated(nn.Module):
    """A gated linear unit, plain or over the sequence unfolded in windows."""

    def __init__(self, sizes: Sizes, draw: random.Random, dropout: float) -> None:
        super().__init__()
        self.windows = draw.random() < 0.5
        self.up = nn.Linear(sizes.width * (3 if self.windows else 1), 2 * sizes.hidden)
        self.down = nn.Linear(sizes.hidden, sizes.width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        y = x
        if self.windows:
            y = functional.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1).flatten(2)
        return x + self.down(functional.glu(self.up(y), dim=-1))


class Spectrum(nn.Module):
    """Fourier transforms along the sequence or the width, with complex weights or without."""

    def __init__(self, sizes: Sizes, draw: random.Random, dropout: float) -> None:
        super().__init__()
        self.over = draw.choice([1, 2])
        size = sizes.sequence if self.over == 1 else sizes.width
        shape = (size // 2 + 1, 1, 2) if self.over == 1 else (1, size // 2 + 1, 2)
        self.weight = nn.Parameter(0.3 * torch.randn(shape)) if draw.random() < 0.7 else None

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=self.over, norm="ortho")
        if self.weight is not None:
            spectrum = spectrum * torch.view_as_complex(self.weight)
        return x + torch.fft.irfft(spectrum, n=x.shape[self.over], dim=self.over, norm="ortho")


class Turned(nn.Module):
    """Rotary positions as products of complex numbers."""

    def __init__(self, sizes: Sizes, draw: random.Random, dropout: float) -> None:
        super().__init__()
        self.pairs = 2 * sizes.hidden
        self.up, self.down = (
            nn.Linear(*ends) for ends in ((sizes.width, self.pairs), (self.pairs, sizes.width))
        )

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        y = self.up(x)
        number = torch.view_as_complex(y.unflatten(-1, (-1, 2)))
        places, speeds = (torch.arange(n, dtype=x.dtype) for n in (x.shape[1], self.pairs // 2))
        angles = torch.outer(places, 1.0 / (1 + speeds))
        turned = number * torch.polar(torch.ones_like(angles), angles)
        return x + self.down(torch.view_as_real(turned).flatten(-2))


class Scan(nn.Module):
    """Running products, and running sums in log space."""

    def __init__(self, sizes: Sizes, draw: random.Random, dropout: float) -> None:
        super().__init__()
        self.by_product = draw.random() < 0.5
        self.gate = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        keep = torch.sigmoid(self.gate(x))
        if self.by_product:
            return x + keep.cumprod(1) * x
        return x + torch.exp(keep.log().cumsum(1)) * x


class Recurrent(nn.Module):
    def __init__(self, sizes: Sizes, draw: random.Random, dropout: float) -> None:
        super().__init__()
        kind = draw.choice([nn.LSTM, nn.GRU])
        self.cells = kind(sizes.width, sizes.width, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + self.cells(x)[0]


BLOCKS = (SelfAttention, CrossAttention, FusedAttention, Mlp, Mlp, Experts, Convolution, Mixing)
MORE_BLOCKS = (Gated, Spectrum, Turned, Scan, Recurrent)
"""Of the ops that came later: drawn by themselves, since what others draw follows from a seed."""


class Model(nn.Module):
    """Token numbers or numbers in; the loss. The first states are the blocks' memory. more: draws
    a block of MORE_BLOCKS for each layer, half of the time, or always one of `others`."""

    def __init__(
        self,
        sizes: Sizes,
        draw: random.Random,
        dropout: float,
        more: random.Random | None = None,
        others: Sequence[Callable[[Sizes, random.Random, float], nn.Module]] = (),
    ) -> None:
        super().__init__()
        self.stem = draw.choice(["tokens", "tokens", "image"])
        self.reduction = draw.choice(["mean", "mean", "sum"])
        table = nn.Embedding(sizes.vocabulary, sizes.width, draw.choice([None, 0]))
        self.embed = table if self.stem == "tokens" else nn.Conv2d(3, sizes.width, 2, stride=2)
        kinds = [draw.choice(BLOCKS) for _ in range(draw.randint(1, 3))]
        depth = draw.choice([1, 2, 3])
        if more is not None and (others or more.random() < 0.5):
            kinds.insert(more.randint(0, len(kinds)), more.choice(others or MORE_BLOCKS))
        self.blocks = nn.ModuleList(
            kind(sizes, random.Random(k), dropout)
            for _ in range(depth)
            for k, kind in enumerate(kinds)
        )
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=draw.random() < 0.5)
        if self.stem == "tokens" and draw.random() < 0.5:
            self.head.weight = table.weight

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss_of(self.logits(x), labels)

    def logits(self, x: Tensor) -> Tensor:
        """[batch, sequence, vocabulary]"""
        states = self.embed(x)
        if self.stem == "image":
            states = states.flatten(2).transpose(1, 2)
        memory = states
        for block in self.blocks:
            states = block(states, memory)
        return self.head(self.norm(states))

    def loss_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction=self.reduction
        )

    def __str__(self) -> str:
        blocks = "+".join(type(b).__name__ for b in self.blocks)
        tied = " tied" if self.head.weight is getattr(self.embed, "weight", None) else ""
        return f"{self.stem}{tied} {blocks} {self.reduction}"
