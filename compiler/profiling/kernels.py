"""The kernels that a profile times: starts, copies and other kernels that move bytes, products over
shapes and dtypes, attention forward and backward. Work is counted as
meshfold.cost_models.op_costs.compute counts it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.cost_models.calibration.points import KernelKind, KernelPoint
from meshfold.cost_models.op_costs.attention import Scores
from meshfold.torch_compat.dtypes import torch_dtype

Run = Callable[[], object]

CHAIN = 16
"""Small kernels in a row whose starts are timed."""
SQUARES = {"cpu": (128, 256, 512, 1024), "cuda": (256, 512, 1024, 2048, 4096, 8192)}
FEW_ROWS = {"cpu": (16, 64), "cuda": (16, 128, 512)}
"""Of products with square weights of WEIGHT."""
WEIGHT = {"cpu": 512, "cuda": 4096}
SLOW_SQUARES = {"cpu": (128, 256), "cuda": (512, 1024)}
"""Of dtypes that may have no fast path."""
FAST = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16", "float32")}
"""Of which attention and pieces of models are timed, too."""
SLOW = {"cpu": ("float64",), "cuda": ("float16", "float64")}
MOVED = {"cpu": (2**12, 2**16, 2**20, 2**22), "cuda": (2**16, 2**20, 2**24, 2**26)}
"""Numbers of float32."""
QUERIES = {"cpu": ((2, 4, 64, 32), (2, 4, 256, 64)), "cuda": ((4, 16, 512, 64), (4, 16, 2048, 128))}
"""[batch, heads, sequence, width] of attention."""


@dataclass(frozen=True)
class Kernels:
    """Kernels to be timed. make: their inputs, and what runs them once."""

    name: str
    kind: KernelKind
    dtype: str
    kernels: int
    flops: float
    attention_flops: float
    num_bytes: float
    make: Callable[[torch.device], Run]

    def point(self, seconds: float) -> KernelPoint:
        return KernelPoint(
            self.kind,
            self.dtype,
            self.kernels,
            float(self.flops),
            float(self.attention_flops),
            float(self.num_bytes),
            seconds,
        )


def starts() -> Iterator[Kernels]:
    """Kernels that hardly work, forward, and forward and backward."""

    def forward(device: torch.device) -> Run:
        x = torch.ones(8, device=device)
        return lambda: x + x

    def chain(device: torch.device) -> Run:
        leaf = torch.ones(8, device=device, requires_grad=True)
        gradient = torch.ones(8, device=device)

        def run() -> None:
            x = leaf
            for _ in range(CHAIN):
                x = x * 1.0
            torch.autograd.grad(x, leaf, gradient)

        return run

    yield Kernels("start", "launch", "float32", 1, 0, 0, 96, forward)
    yield Kernels("starts/backward", "launch", "float32", 2 * CHAIN, 0, 0, 64 * 2 * CHAIN, chain)


def movers(device_type: str) -> Iterator[Kernels]:
    """Kernels bound by memory, the largest first."""
    ops: dict[str, tuple[int, Callable[[Tensor, Tensor], Tensor]]] = {
        "copy": (2, lambda x, _: x.clone()),
        "add": (3, torch.add),
        "gelu": (2, lambda x, _: F.gelu(x)),
        "softmax": (2, lambda x, _: x.softmax(-1)),
    }
    for numel in reversed(MOVED[device_type]):
        for name, (passes, op) in ops.items():

            def make(
                device: torch.device,
                numel: int = numel,
                op: Callable[[Tensor, Tensor], Tensor] = op,
            ) -> Run:
                x, y = (torch.randn(numel // 256, 256, device=device) for _ in range(2))
                return lambda: op(x, y)

            moved = passes * 4 * numel
            yield Kernels(f"{name}/{4 * numel}", "memory", "float32", 1, 0, 0, moved, make)


def products(device_type: str) -> Iterator[Kernels]:
    """Products, the largest first."""
    width = WEIGHT[device_type]
    for dtype in FAST[device_type]:
        for n in reversed(SQUARES[device_type]):
            yield _product(n, n, n, dtype)
        for rows in FEW_ROWS[device_type]:
            yield _product(rows, width, width, dtype)
    for dtype in SLOW[device_type]:
        for n in reversed(SLOW_SQUARES[device_type]):
            yield _product(n, n, n, dtype)


def _product(m: int, n: int, k: int, dtype: str) -> Kernels:
    of = torch_dtype(dtype)

    def make(device: torch.device) -> Run:
        left = torch.randn(m, k, device=device).to(of)
        right = torch.randn(k, n, device=device).to(of)
        return lambda: left @ right

    num_bytes = (m * k + k * n + m * n) * of.itemsize
    return Kernels(f"{dtype}/{m}x{n}x{k}", "gemm", dtype, 1, 2 * m * n * k, 0, num_bytes, make)


def attention(device_type: str) -> Iterator[Kernels]:
    """Forward, and forward and backward; causal or not."""
    for dtype in FAST[device_type]:
        for shape in QUERIES[device_type]:
            for is_causal in (True, False):
                for is_trained in (False, True):
                    yield _attention(shape, dtype, is_causal, is_trained)


def _attention(
    shape: tuple[int, int, int, int], dtype: str, is_causal: bool, is_trained: bool
) -> Kernels:
    batch, heads, sequence, width = shape
    of = torch_dtype(dtype)

    def make(device: torch.device) -> Run:
        q, k, v = (
            torch.randn(shape, device=device).to(of).requires_grad_(is_trained) for _ in range(3)
        )
        gradient = torch.randn(shape, device=device).to(of)

        def run() -> object:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
            return torch.autograd.grad(out, (q, k, v), gradient) if is_trained else out

        return run

    square = batch * heads * sequence**2 / (2 if is_causal else 1)
    one = batch * heads * sequence * width * of.itemsize
    # Backward reads the gradient and q, k, v, and writes three gradients.
    flops, num_bytes = 2 * square * 2 * width / Scores(square, width).of_rate, 4 * one
    if is_trained:
        flops, num_bytes = 3.5 * flops, num_bytes + 7 * one
    words = ("causal" if is_causal else "full", "training" if is_trained else "forward")
    name = "/".join((dtype, "x".join(map(str, shape)), *words))
    return Kernels(name, "attention", dtype, 1 + is_trained, 0, flops, num_bytes, make)
