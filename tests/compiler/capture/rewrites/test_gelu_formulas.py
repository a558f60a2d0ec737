"""GELU by any formula becomes aten.gelu; formulas of something else stay."""

import math
from collections.abc import Callable

import pytest
import torch
from support.graphs.captured import captured_in_float64, targets_of
from torch import Tensor, nn

TANH: list[Callable[[Tensor], Tensor]] = [
    lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3.0)))),
    lambda x: x * (torch.tanh(x * math.sqrt(2 / math.pi) * (1 + 0.044715 * x * x)) + 1) * 0.5,
]
ERF: list[Callable[[Tensor], Tensor]] = [
    lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    lambda x: x * (torch.erf(x * 0.5**0.5) / 2 + 0.5),
]
OTHERS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x * torch.tanh(x),
    lambda x: 0.5 * x * (1 + torch.tanh(0.79788 * (x + 0.044715 * x.pow(3.0)))),
    lambda x: x[:1] * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
]


class Curve(nn.Module):
    """A formula of sums, so that they could be part of it."""

    def __init__(self, formula: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-3.0, 3.0, 12).reshape(3, 4))
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self.weight + x)


def targets(formula: Callable[[Tensor], Tensor]) -> list[str]:
    x = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).reshape(3, 4)
    return targets_of(captured_in_float64(Curve(formula), {"x": x}))


@pytest.mark.parametrize("formula", [*TANH, *ERF])
def test_a_formula_is_gelu(formula: Callable[[Tensor], Tensor]) -> None:
    assert targets(formula) == ["add", "gelu"]


@pytest.mark.parametrize("formula", OTHERS)
def test_another_formula_stays(formula: Callable[[Tensor], Tensor]) -> None:
    assert "gelu" not in targets(formula)


def test_what_is_read_elsewhere_is_computed_for_that() -> None:
    def both(x: Tensor) -> Tensor:
        curve = torch.erf(x / math.sqrt(2.0))
        return x * 0.5 * (1.0 + curve) + curve

    assert targets(both) == ["add", "div", "erf", "gelu", "add"]
