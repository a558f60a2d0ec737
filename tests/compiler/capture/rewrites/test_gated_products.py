"""Gated linear units become one op; other products of activations stay."""

from collections.abc import Callable

import pytest
import torch
from support.graphs.captured import captured_in_float64, targets_of
from torch import Tensor, nn
from torch.nn import functional as F

Gate = Callable[[Tensor, Tensor], Tensor]

GATED: list[Gate] = [
    lambda gate, x: F.silu(gate) * x,
    lambda gate, x: x * F.gelu(gate),
    lambda gate, x: F.gelu(gate, approximate="tanh") * x,
    lambda gate, x: F.silu(gate) * F.silu(x),
]
OTHERS: list[Gate] = [
    lambda gate, x: F.silu(gate) * x.sum(),
    lambda gate, x: (y := F.silu(gate)) * y + x,
    lambda gate, x: (y := F.silu(gate)) * x + y,
    lambda gate, x: F.silu(gate) * 2.0 + x,
    lambda gate, x: F.relu(gate) * x,
]


class Unit(nn.Module):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.up(x), self.down(x))


def targets(gate: Gate) -> list[str]:
    x = torch.randn(3, 4, dtype=torch.float64)
    return targets_of(captured_in_float64(Unit(gate), {"x": x}))


@pytest.mark.parametrize("gate", GATED)
def test_a_gated_unit_is_one_op(gate: Gate) -> None:
    assert targets(gate)[-1] == "gated_product"


@pytest.mark.parametrize("gate", OTHERS)
def test_another_product_stays(gate: Gate) -> None:
    assert "gated_product" not in targets(gate)
