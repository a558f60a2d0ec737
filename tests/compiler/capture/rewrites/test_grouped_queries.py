"""Attention reads key heads that groups share as they are; everything else stays."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from support.graphs.captured import captured_in_float64, targets_of
from support.models.hugging_face import BATCH, tiny_model
from support.programs.local_programs import emit_uniform, errors_of_a_step, one_process
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from meshfold.capture.pipeline import Captured, capture
from meshfold.ir.strategy import UniformStrategy
from meshfold.validation.float64_mode import float64_everywhere

GROUP = 3

Repeat = Callable[[Tensor], Tensor]


def neighbours(x: Tensor) -> Tensor:
    b, g, t, e = x.shape
    return x[:, :, None].expand(b, g, GROUP, t, e).reshape(b, g * GROUP, t, e)


def in_turns(x: Tensor) -> Tensor:
    b, g, t, e = x.shape
    return x[:, None].expand(b, GROUP, g, t, e).reshape(b, g * GROUP, t, e)


class Grouped(nn.Module):
    """reads_copies: whether something else reads what is repeated, too."""

    def __init__(self, repeat: Repeat, *, reads_copies: bool = False, **call: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(4, 4 * n) for n in (2 * GROUP, 2, 2))
        self.repeat, self.reads_copies, self.call = repeat, reads_copies, call

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            of(x).unflatten(-1, (-1, 4)).transpose(1, 2)
            for of in (self.query, self.key, self.value)
        )
        key, value = self.repeat(key), self.repeat(value)
        made = scaled_dot_product_attention(query, key, value, **self.call)
        return made + key if self.reads_copies else made


def captured(model: nn.Module) -> Captured:
    return captured_in_float64(model, {"x": torch.randn(2, 5, 4, dtype=torch.float64)})


@pytest.mark.parametrize("call", [{}, {"is_causal": True, "scale": 0.3}], ids=["plain", "causal"])
def test_groups_share_key_heads(call: dict[str, Any]) -> None:
    assert not {"expand", "clone"}.intersection(targets_of(captured(Grouped(neighbours, **call))))


@pytest.mark.parametrize(
    "model",
    [
        Grouped(in_turns),
        Grouped(neighbours, reads_copies=True),
        Grouped(neighbours, attn_mask=torch.zeros(5, 5, dtype=torch.float64)),
    ],
    ids=["in turns", "read twice", "masked"],
)
def test_other_heads_stay_repeated(model: Grouped) -> None:
    assert "expand" in targets_of(captured(model))


def test_float32_keeps_its_fused_kernels() -> None:
    found = capture(Grouped(neighbours), {"x": torch.randn(2, 5, 4)})
    assert "expand" in targets_of(found)


@cache
def llama() -> tuple[nn.Module, dict[str, Any], Captured, Any]:
    """With four key heads for eight query heads."""
    model, batch = tiny_model("llama", layers=1)
    model.double()
    with float64_everywhere():
        found = capture(model, batch)
    assert "expand" not in targets_of(found)
    return model, batch, found, one_process(model, batch)


@pytest.mark.parametrize(
    "strategy",
    [
        UniformStrategy(dp=2, zero=3),
        UniformStrategy(tp=2),
        UniformStrategy(tp=4, sequence_parallel=True),
        UniformStrategy(tp=8),
    ],
    ids=lambda strategy: strategy.label,
)
def test_loss_and_every_gradient_of_a_llama_equal_one_process(strategy: UniformStrategy) -> None:
    """Eight ranks have a query head each, and pick its key head."""
    model, batch, found, right = llama()
    program = emit_uniform(found, strategy, BATCH)
    for errors in errors_of_a_step(model, batch, found, program, right):
        assert max(errors.values()) < 1e-12, errors
