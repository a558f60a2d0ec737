"""Pieces of models that a profile times: forward and backward of a small decoder. What kernels cost
beside their work shows here: autograd, Python, kernels that find their operands in no cache."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.capture.pipeline import capture
from meshfold.cost_models.op_costs.compute import op_work
from meshfold.ir.op_graph import FoldedGraph
from meshfold.profiling.kernels import FAST, Kernels, Run
from meshfold.torch_compat.dtypes import torch_dtype

VOCABULARY = 512
LAYERS = 2


@dataclass(frozen=True)
class Size:
    """Of a decoder and its batch. The smallest tell what a kernel costs beside its work."""

    width: int
    heads: int
    batch: int
    sequence: int


SIZES = {
    "cpu": (
        Size(256, 8, 2, 64),
        Size(32, 4, 1, 16),
        Size(64, 4, 2, 32),
        Size(512, 8, 2, 64),
        Size(128, 4, 4, 64),
    ),
    "cuda": (Size(1024, 16, 4, 512), Size(256, 8, 4, 128), Size(4096, 32, 2, 1024)),
}


class Layer(nn.Module):
    """Causal attention, then two linears with GELU, each added to what it reads."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before, self.between = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.up, self.down = (
            nn.Linear(size.width, 4 * size.width),
            nn.Linear(4 * size.width, size.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, sequence, width]."""
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        hidden: Tensor = self.down(F.gelu(self.up(self.between(x))))
        return x + hidden


class Decoder(nn.Module):
    """The loss of the next token."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(LAYERS))
        self.head = nn.Linear(size.width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [batch, sequence]."""
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@dataclass(frozen=True)
class Work:
    """Of one step of a model, forward and backward."""

    kernels: int
    flops: float
    attention_flops: float
    num_bytes: float


def blocks(device_type: str) -> Iterator[tuple[str, Callable[[], Kernels]]]:
    """Decoders of several sizes, the most telling first: (name, what captures one)."""
    for size in SIZES[device_type]:
        for dtype in FAST[device_type]:
            name = f"{dtype}/decoder/{size.width}x{size.heads}/{size.batch}x{size.sequence}"
            yield name, partial(_block, name, size, dtype)


def _block(name: str, size: Size, dtype: str) -> Kernels:
    with torch.device("meta"):
        model = Decoder(size).to(torch_dtype(dtype))
    shape = (size.batch, size.sequence)
    work = model_work(capture(model, {"tokens": torch.zeros(shape, dtype=torch.int64)}).graph)
    return Kernels(
        name,
        "block",
        dtype,
        work.kernels,
        work.flops,
        work.attention_flops,
        work.num_bytes,
        partial(_step, size, dtype),
    )


def _step(size: Size, dtype: str, device: torch.device) -> Run:
    model = Decoder(size).to(device=device, dtype=torch_dtype(dtype))
    tokens = torch.randint(0, VOCABULARY, (size.batch, size.sequence), device=device)
    parameters = list(model.parameters())

    def run() -> None:
        for p in parameters:
            p.grad = None
        model(tokens).backward()

    return run


def model_work(graph: FoldedGraph) -> Work:
    """The work of a step on one device, as plans are priced."""
    kernels, flops, attention_flops, num_bytes = 0, 0.0, 0.0, 0.0
    for instance in graph.instances:
        region = graph.regions[instance.region].graph
        for op in region.ops:
            work = op_work(region, op)
            kernels += (work.flops + work.num_bytes > 0) + (
                work.backward_flops + work.backward_bytes > 0
            )
            num_bytes += work.num_bytes + work.backward_bytes
            if work.scores is None:
                flops += work.flops + work.backward_flops
            else:
                attention_flops += (work.flops + work.backward_flops) / work.scores.of_rate
    return Work(kernels, flops, attention_flops, num_bytes)
