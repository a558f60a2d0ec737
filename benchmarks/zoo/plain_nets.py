"""Models in plain torch: contrastive, capsules, sets, splines, frozen parts and more."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from zoo.entry import CLASSES


class Contrastive(nn.Module):
    """SimCLR: both views in one batch, the other view of a sample is its class."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        z = functional.normalize(self.net(torch.cat([a, b])), dim=-1)
        scores = z @ z.t() / 0.5
        scores = scores.masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
        count = len(a)
        labels = torch.cat([torch.arange(count) + count, torch.arange(count)])
        return functional.cross_entropy(scores, labels)


class Capsules(nn.Module):
    """Dynamic routing, three rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.primary = nn.Conv2d(3, 16, 8, 8)
        self.weight = nn.Parameter(0.1 * torch.randn(32, CLASSES, 4, 8))

    def forward(self, x: Tensor) -> Tensor:
        u = self.primary(x).view(len(x), 32, 8)
        votes = torch.einsum("ncde,bne->bncd", self.weight, u)
        b = torch.zeros(votes.shape[:3], dtype=x.dtype)
        for _ in range(3):
            s = (b.softmax(2)[..., None] * votes).sum(1)
            norm = s.norm(dim=-1, keepdim=True)
            v = s * norm / (1 + norm * norm)
            b = b + (votes * v[:, None]).sum(-1)
        return v.norm(dim=-1)


class Perceiver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(6, 16))
        self.cross = nn.MultiheadAttention(16, 2, kdim=8, vdim=8, batch_first=True)
        self.own = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latents.unsqueeze(0).repeat(x.shape[0], 1, 1)
        y, _ = self.cross(latents, x, x)
        for _ in range(2):
            y = self.own(y)
        return self.head(y.mean(1))


class SetAttention(nn.Module):
    """Set Transformer with a learned seed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.seed = nn.Linear(8, 16), nn.Parameter(torch.randn(1, 1, 16))
        self.a, self.b = (nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        y = y + self.a(y, y, y)[0]
        return self.head(self.b(self.seed.expand(len(x), -1, -1), y, y)[0].squeeze(1))


class ConvLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates, self.head = nn.Conv2d(11, 32, 3, padding=1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(len(x), 8, *x.shape[-2:], dtype=x.dtype)
        for step in range(x.shape[1]):
            i, f, o, g = self.gates(torch.cat([x[:, step], h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.head(h)


class Splines(nn.Module):
    """A layer of a Kolmogorov-Arnold network on radial bases."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, 5))
        self.spline, self.base = nn.Linear(5 * inner, outer, bias=False), nn.Linear(inner, outer)

    def forward(self, x: Tensor) -> Tensor:
        basis = torch.exp(-((x.unsqueeze(-1) - self.grid) ** 2)).flatten(-2)
        return self.spline(basis) + self.base(functional.silu(x))


class Hyper(nn.Module):
    """A network makes the weights of another one, by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.out = nn.Linear(8, 16 * 8), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.maker(x).view(-1, 16, 8)
        return self.out(torch.bmm(weight, x.unsqueeze(-1)).squeeze(-1).relu())


class SkipGram(nn.Module):
    """word2vec with negative samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Embedding(64, 16), nn.Embedding(64, 16)

    def forward(self, center: Tensor, context: Tensor, negative: Tensor) -> Tensor:
        v = self.inner(center)
        right = functional.logsigmoid((v * self.outer(context)).sum(-1))
        wrong = functional.logsigmoid(-(self.outer(negative) @ v.unsqueeze(-1)).squeeze(-1)).sum(-1)
        return -(right + wrong).mean()


class LowRank(nn.Module):
    """LoRA by hand: the base is frozen."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, layer.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + (x @ self.a.T) @ self.b.T


class FrozenHalf(nn.Module):
    """A frozen backbone in no_grad, and a head that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
        self.backbone.requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.backbone(x)
        return self.head(hidden)


class Mixture(nn.Module):
    """A mixture density network."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.out = nn.Sequential(nn.Linear(8, 32), nn.Tanh()), nn.Linear(32, 12)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits, mean, log_scale = self.out(self.net(x)).chunk(3, -1)
        normal = torch.distributions.Normal(mean, log_scale.exp(), validate_args=False)
        return -torch.logsumexp(logits.log_softmax(-1) + normal.log_prob(y), -1).mean()
