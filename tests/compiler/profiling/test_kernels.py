"""The kernels of a profile: names, and work as plans count it."""

from collections.abc import Iterator

import pytest
import torch

from meshfold.capture.pipeline import capture
from meshfold.profiling.blocks import Work, model_work
from meshfold.profiling.kernels import Kernels, attention, movers, products, starts

CPU = torch.device("cpu")


def kernels(device_type: str) -> Iterator[Kernels]:
    yield from starts()
    for some in (movers, products, attention):
        yield from some(device_type)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_names_tell_points_apart(device_type: str) -> None:
    names = [k.name for k in kernels(device_type)]
    assert len(names) == len(set(names)) > 20
    assert {k.kind for k in kernels(device_type)} == {"launch", "memory", "gemm", "attention"}


def test_each_runs() -> None:
    small = [k for k in kernels("cpu") if k.flops + k.attention_flops < 1e7 and k.num_bytes < 1e6]
    assert {k.kind for k in small} == {"launch", "memory", "gemm", "attention"}
    for k in small:
        k.make(CPU)()


def test_a_product_by_hand() -> None:
    found = next(k for k in products("cpu") if k.name == "float64/128x128x128")
    assert (found.flops, found.num_bytes, found.kernels) == (2 * 128**3, 3 * 128**2 * 8, 1)


class Attention(torch.nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_is_counted_as_plans_count_it(is_causal: bool) -> None:
    words = ("causal" if is_causal else "full", "forward")
    name = "/".join(("float32", "2x4x64x32", *words))
    found = next(k for k in attention("cpu") if k.name == name)
    inputs = {n: torch.zeros(2, 4, 64, 32) for n in "qkv"}
    work = model_work(capture(Attention(is_causal), inputs).graph)
    assert work == Work(1, 0.0, pytest.approx(found.attention_flops), found.num_bytes)
    trained = next(k for k in attention("cpu") if k.name == name.replace("forward", "training"))
    assert trained.attention_flops == 3.5 * found.attention_flops
    assert (trained.kernels, trained.num_bytes) == (2, 11 * 2 * 4 * 64 * 32 * 4)
