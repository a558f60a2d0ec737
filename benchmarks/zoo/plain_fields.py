"""Models in plain torch: images, generative models, tables, graphs, sets, fields and physics."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from zoo.entry import CLASSES


class UNet(nn.Module):
    """Two levels, skips by concatenation."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()

        def double(inner: int, outer: int) -> nn.Sequential:
            return nn.Sequential(
                *(nn.Conv2d(inner, outer, 3, padding=1), norm(outer), nn.ReLU(inplace=True)),
                *(nn.Conv2d(outer, outer, 3, padding=1), norm(outer), nn.ReLU(inplace=True)),
            )

        self.down = nn.ModuleList([double(3, 8), double(8, 16), double(16, 32)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.join, self.head = nn.ModuleList([double(32, 16), double(16, 8)]), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for k, block in enumerate(self.down):
            x = block(x if k == 0 else functional.max_pool2d(x, 2))
            skips.append(x)
        for up, join, skip in zip(self.up, self.join, skips[-2::-1], strict=True):
            x = join(torch.cat([skip, up(x)], dim=1))
        return self.head(x)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.body(x))


class Patches(nn.Module):
    """Images to rows of patches and back to a class, around a body."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 32, 8, 8), nn.Sequential(*body)
        self.token = nn.Parameter(torch.zeros(1, 1, 32))
        self.position = nn.Parameter(torch.randn(1, 17, 32) * 0.02)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.stem(x).flatten(2).transpose(1, 2)
        rows = torch.cat([self.token.expand(len(x), -1, -1), rows], dim=1) + self.position
        return self.head(self.body(rows)[:, 0])


class Variational(nn.Module):
    """A VAE whose noise is drawn in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(48, 32), nn.ReLU())
        self.mean, self.log_var = nn.Linear(32, 8), nn.Linear(32, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 48))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        mean, log_var = self.mean(hidden), self.log_var(hidden)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_var)
        divergence = -0.5 * torch.mean(1 + log_var - mean.pow(2) - log_var.exp())
        return functional.mse_loss(self.decoder(z), x) + 0.1 * divergence


class VectorQuantized(nn.Module):
    """A VQ-VAE, straight through by detach."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(3, 16, 4, 4), nn.ConvTranspose2d(16, 3, 4, 4)
        self.codes = nn.Embedding(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x).permute(0, 2, 3, 1)
        flat = z.reshape(-1, 16)
        distance = (
            flat.pow(2).sum(1, keepdim=True)
            - 2 * flat @ self.codes.weight.t()
            + self.codes.weight.pow(2).sum(1)
        )
        quantized = self.codes(distance.argmin(1)).view_as(z)
        loss = functional.mse_loss(quantized, z.detach())
        loss = loss + 0.25 * functional.mse_loss(z, quantized.detach())
        quantized = z + (quantized - z).detach()
        return loss + functional.mse_loss(self.decoder(quantized.permute(0, 3, 1, 2)), x)


class Generator(nn.Sequential):
    """DCGAN's."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.ConvTranspose2d(16, 32, 4, 1, 0, bias=False), nn.BatchNorm2d(32), nn.ReLU(True)),
            *(nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True)),
            *(nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False), nn.Tanh()),
        )


class DiffusionBlock(nn.Module):
    """DiT's block with adaptive norms."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU("tanh"), nn.Linear(64, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        s1, b1, g1, s2, b2, g2 = self.modulation(c).unsqueeze(1).chunk(6, dim=-1)
        y = self.norm(x) * (1 + s1) + b1
        x = x + g1 * self.attention(y, y, y, need_weights=False)[0]
        return x + g2 * self.mlp(self.norm(x) * (1 + s2) + b2)


class DiffusionTransformer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv2d(3, width, 4, 4), nn.Linear(width, 48)
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(CLASSES, width)
        self.blocks = nn.ModuleList(DiffusionBlock(width) for _ in range(2))

    def forward(self, noisy: Tensor, t: Tensor, y: Tensor) -> Tensor:
        frequency = torch.exp(-math.log(10000) * torch.arange(8, device=t.device) / 8)
        angles = t[:, None].to(noisy.dtype) * frequency[None]
        c = self.time(torch.cat([angles.cos(), angles.sin()], -1).to(noisy.dtype)) + self.label(y)
        x = self.stem(noisy).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, c)
        patches = self.out(x).view(len(x), 4, 4, 4, 4, 3)
        return torch.einsum("nhwpqc->nchpwq", patches).reshape(len(x), 3, 16, 16)


class Coupling(nn.Module):
    """RealNVP's negative log likelihood."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        log_det = x.new_zeros(x.shape[0])
        for net in self.nets:
            a, b = x.chunk(2, dim=1)
            scale, shift = net(a).chunk(2, dim=1)
            scale = torch.tanh(scale)
            x = torch.cat([b * torch.exp(scale) + shift, a], dim=1)
            log_det = log_det + scale.sum(dim=1)
        return (0.5 * x.pow(2).sum(1) - log_det).mean()


class Recommender(nn.Module):
    """DLRM: embeddings of categories, dot products of all pairs, two MLPs."""

    def __init__(self, tables: int = 3, *, bags: bool = False) -> None:
        super().__init__()
        kind = nn.EmbeddingBag if bags else nn.Embedding
        self.tables = nn.ModuleList(kind(40, 16) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(16 + pairs, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("i", torch.tril_indices(tables + 1, tables + 1, -1)[0])
        self.register_buffer("j", torch.tril_indices(tables + 1, tables + 1, -1)[1])

    def forward(self, dense: Tensor, sparse: Tensor, clicked: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = [table(sparse[:, k]) for k, table in enumerate(self.tables)]
        all_rows = torch.stack([x, *rows], dim=1)
        products = torch.bmm(all_rows, all_rows.transpose(1, 2))[:, self.i, self.j]
        logits = self.top(torch.cat([x, products], dim=1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logits, clicked)


class Factorized(nn.Module):
    """A factorization machine with a deep part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(60, 1), nn.Embedding(60, 8)
        self.deep = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def forward(self, fields: Tensor, clicked: Tensor) -> Tensor:
        v = self.second(fields)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1)
        logits = self.first(fields).sum((1, 2)) + pairs + self.deep(v.flatten(1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logits, clicked)


class Radiance(nn.Module):
    """NeRF: encoded points, an MLP with a skip, and volume rendering."""

    def __init__(self, levels: int = 4) -> None:
        super().__init__()
        size = 3 + 6 * levels
        self.first = nn.Sequential(nn.Linear(size, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.last = nn.Sequential(nn.Linear(32 + size, 32), nn.ReLU())
        self.density, self.color = nn.Linear(32, 1), nn.Linear(32, 3)
        self.register_buffer("frequencies", 2.0 ** torch.arange(levels))

    def forward(self, origin: Tensor, direction: Tensor, target: Tensor) -> Tensor:
        depth = torch.linspace(2.0, 6.0, 8, dtype=origin.dtype)
        points = origin[:, None] + direction[:, None] * depth[None, :, None]
        angles = (points[..., None] * self.frequencies).flatten(-2)
        x = torch.cat([points, angles.sin(), angles.cos()], -1)
        hidden = self.last(torch.cat([self.first(x), x], -1))
        alpha = 1 - torch.exp(-functional.relu(self.density(hidden)).squeeze(-1) * 0.5)
        clear = torch.cumprod(
            torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1
        )[:, :-1]
        weights = alpha * clear
        color = (weights[..., None] * torch.sigmoid(self.color(hidden))).sum(1)
        return functional.mse_loss(color, target)


class Sine(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inner, outer)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30 * self.linear(x))


class DenseGraph(nn.Module):
    """Graph convolutions over padded adjacency matrices; heads > 0: attention over neighbours."""

    def __init__(self, heads: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.linears = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.scores = nn.ModuleList(nn.Linear(16, 2 * heads) for _ in range(2)) if heads else None
        self.head = nn.Linear(16, 4)

    def forward(self, nodes: Tensor, adjacency: Tensor, target: Tensor) -> Tensor:
        x = nodes
        for k, linear in enumerate(self.linears):
            y = linear(x)
            if self.scores is None:
                degree = adjacency.sum(-1).clamp(min=1).rsqrt()
                y = (adjacency * degree[..., None] * degree[:, None]) @ y
            else:
                left, right = self.scores[k](y).chunk(2, -1)
                e = functional.leaky_relu(left[:, :, None] + right[:, None], 0.2)
                e = e.masked_fill(adjacency[..., None] == 0, -1e9).softmax(2)
                split = y.unflatten(-1, (self.heads, -1))
                y = torch.einsum("bijh,bjhd->bihd", e, split).flatten(-2)
            x = functional.relu(y)
        return functional.mse_loss(self.head(x.mean(1)), target)


class Messages(nn.Module):
    """Message passing over a list of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(33, 32), nn.ReLU(), nn.Linear(32, 16))
        self.update, self.head = nn.GRUCell(16, 16), nn.Linear(16, 4)

    def forward(self, nodes: Tensor, source: Tensor, to: Tensor, length: Tensor) -> Tensor:
        x = nodes
        for _ in range(2):
            m = self.message(torch.cat([x[source], x[to], length[:, None]], -1))
            x = self.update(torch.zeros_like(x).index_add(0, to, m), x)
        return self.head(x)


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.local = nn.Sequential(
            *(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 1)),
            *(nn.BatchNorm1d(32), nn.ReLU()),
        )
        self.head = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.local(x).max(dim=-1)[0])


class SpectralConvolution(nn.Module):
    """A Fourier neural operator's layer: complex weights on the low modes."""

    def __init__(self, width: int = 8, modes: int = 3) -> None:
        super().__init__()
        self.modes, self.local = modes, nn.Conv2d(width, width, 1)
        shape = (width, width, modes, modes, 2)
        self.low, self.high = (nn.Parameter(torch.rand(shape) / width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        m, spectrum = self.modes, torch.fft.rfft2(x)
        low = torch.einsum(
            "bixy,ioxy->boxy", spectrum[:, :, :m, :m], torch.view_as_complex(self.low)
        )
        high = torch.einsum(
            "bixy,ioxy->boxy", spectrum[:, :, -m:, :m], torch.view_as_complex(self.high)
        )
        rest = low.new_zeros(*x.shape[:2], x.shape[2] - 2 * m, m)
        out = torch.cat([low, rest, high], 2)
        out = functional.pad(out, (0, x.shape[3] // 2 + 1 - m))
        return functional.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + self.local(x))


class DeepOperator(nn.Module):
    """DeepONet."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 24))
        self.trunk = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 24))

    def forward(self, sensors: Tensor, points: Tensor) -> Tensor:
        return torch.einsum("bk,bpk->bp", self.branch(sensors), self.trunk(points))


class NeuralOde(nn.Module):
    """Four steps of Runge-Kutta."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.head = (
            nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)),
            nn.Linear(8, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = 0.25
        for _ in range(4):
            k1 = self.f(x)
            k2 = self.f(x + h / 2 * k1)
            k3 = self.f(x + h / 2 * k2)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + self.f(x + h * k3))
        return self.head(x)
