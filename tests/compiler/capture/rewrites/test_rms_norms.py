"""Norms that models write out become one op, with the same numbers; what is none stays."""

from collections.abc import Callable

import pytest
import torch
from support.graphs.captured import captured_in_float64, targets_of
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from meshfold.capture.pipeline import capture

WIDTH = 8


class Normed(nn.Module):
    """A table of rows, `before` them, and a sum of their squares behind."""

    def __init__(self, norm: Callable[[Tensor], Tensor], before: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5, WIDTH)
        self.before = before or nn.Identity()
        self.norm = norm

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.norm(self.before(self.table(ids)))
        return (y * y.cos()).sum()


class Written(nn.Module):
    """A norm by functions of x and of its inverse root mean square."""

    def __init__(self, result: Callable[[Tensor, Tensor], Tensor], eps: float = 1e-6) -> None:
        super().__init__()
        self.result, self.eps = result, eps

    def forward(self, x: Tensor) -> Tensor:
        return self.result(x, torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def ids() -> Tensor:
    return torch.tensor([[0, 3, 1], [4, 4, 2]])


NORMS: list[Callable[[int], nn.Module]] = [
    LlamaRMSNorm,
    GemmaRMSNorm,
    T5LayerNorm,
    lambda _: Written(lambda x, inverse: x * inverse),
    lambda _: Written(lambda x, inverse: inverse * x),
]


@pytest.mark.parametrize("make", NORMS)
def test_a_norm_is_one_op_with_the_same_numbers(make: Callable[[int], nn.Module]) -> None:
    norm = make(WIDTH)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    found = targets_of(captured_in_float64(Normed(norm), {"ids": ids()}))
    assert found.count("rms_norm") == 1 and "rsqrt" not in found


@pytest.mark.parametrize("make", NORMS[:3])
def test_in_bfloat16_nothing_of_it_is_left(make: Callable[[int], nn.Module]) -> None:
    found = targets_of(capture(Normed(make(WIDTH)), {"ids": ids()}, precision="bf16"))
    # Of Gemma's weight, (1 + weight) in float32.
    rest = [name for name in found if name not in ("_to_copy", "add")]
    assert rest == ["embedding", "rms_norm", "cos", "mul", "sum"]


OTHERS = [
    Written(lambda x, inverse: inverse * x.abs()),
    Written(lambda x, inverse: x * inverse + inverse),
    Written(lambda x, inverse: x * inverse.sum()),
]


@pytest.mark.parametrize("other", OTHERS)
def test_what_only_looks_like_a_norm_stays(other: nn.Module) -> None:
    assert "rsqrt" in targets_of(captured_in_float64(Normed(other), {"ids": ids()}))


def test_columns_of_a_product_stay_shardable() -> None:
    model = Normed(LlamaRMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    assert "rsqrt" in targets_of(captured_in_float64(model, {"ids": ids()}))


def test_heads_of_a_product_are_normed_in_one_op() -> None:
    heads = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Unflatten(-1, (2, WIDTH // 2)))
    model = Normed(LlamaRMSNorm(WIDTH // 2), heads)
    assert "rms_norm" in targets_of(captured_in_float64(model, {"ids": ids()}))
