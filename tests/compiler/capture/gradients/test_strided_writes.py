"""Writes into strided parts: the values and gradients of torch, where its own op has others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.programs.local_programs import emit_uniform, errors_of_a_step
from torch import Tensor, nn

from meshfold.capture.pipeline import capture
from meshfold.errors import CaptureError
from meshfold.ir.strategy import UniformStrategy
from meshfold.ops.reference_interpreter import run_graph
from meshfold.validation.float64_mode import float64_everywhere

Write = Callable[[Tensor, Tensor], Any]


def diagonal_filled(h: Tensor, other: Tensor) -> Any:
    h.fill_diagonal_(0.3)


def diagonal_written(h: Tensor, other: Tensor) -> Any:
    h.diagonal().copy_(other[0])


def by_strides(h: Tensor, other: Tensor) -> Any:
    h.as_strided((2, 3), (12, 2), 1).mul_(other[:2, :3])


def in_one_place_of_each(h: Tensor, other: Tensor) -> Any:
    h.as_strided((5,), (7,)).add_(other[0, :5])


WRITES = [diagonal_filled, diagonal_written, by_strides, in_one_place_of_each]


class Compared(nn.Module):
    """Scores of all samples with all others, as contrastive losses have them."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 6), nn.Linear(4, 6)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        scores = self.one(x) @ self.other(x).t()
        self.write(scores, self.other(x))
        loss: Tensor = scores.logsumexp(-1).mean() + scores.square().mean()
        return loss


@pytest.mark.parametrize("write", WRITES)
def test_gradients_are_those_of_the_model(write: Any) -> None:
    torch.manual_seed(0)
    model, x = Compared(write).double(), torch.randn(6, 4, dtype=torch.float64)
    with float64_everywhere():
        captured = capture(model, {"x": x})
    parameters = dict(model.named_parameters())
    (loss,) = run_graph(captured.graph, parameters, {}, captured.constants, {"x": x}).values()
    expected, leaves = model(x), list(parameters.values())
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-14)
    pairs = (torch.autograd.grad(y, leaves) for y in (loss, expected))
    for mine, right in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-13)


@pytest.mark.parametrize("write", [diagonal_filled, by_strides])
@pytest.mark.parametrize("strategy", [UniformStrategy(dp=2, zero=3), UniformStrategy(tp=2)])
def test_ranks_agree(write: Any, strategy: UniformStrategy) -> None:
    torch.manual_seed(0)
    model, batch = Compared(write).double(), {"x": torch.randn(6, 4, dtype=torch.float64)}
    with float64_everywhere():
        captured = capture(model, batch)
    for errors in errors_of_a_step(model, batch, captured, emit_uniform(captured, strategy, 6)):
        assert max(errors.values()) < 1e-12


def twice_to_a_place(h: Tensor, other: Tensor) -> Any:
    h.as_strided((2, 3), (1, 1)).fill_(0.5)


def test_two_writes_to_a_place_are_refused() -> None:
    with pytest.raises(CaptureError, match="or twice to one place; write it with scatter"):
        capture(Compared(twice_to_a_place), {"x": torch.randn(6, 4)})
