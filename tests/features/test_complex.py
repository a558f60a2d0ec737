"""Complex values inside a model, on simulated ranks."""

import pytest
import torch
from support.programs.local_programs import capture, emit_uniform, errors_of_a_step
from torch import Tensor, nn

from meshfold.ir.strategy import UniformStrategy


class Rotated(nn.Module):
    """A rotation by complex numbers, as Llama 4 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.angles = nn.Parameter(torch.linspace(0, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        turns = torch.polar(torch.ones_like(self.angles), self.angles)
        y = torch.view_as_complex(self.up(x).unflatten(-1, (4, 2))) * turns
        return torch.view_as_real(y).square().mul(torch.arange(2)).mean()


@pytest.mark.parametrize("strategy", [UniformStrategy(dp=2), UniformStrategy(tp=2)])
def test_complex_values_and_their_gradients(strategy: UniformStrategy) -> None:
    model, batch = Rotated().double(), {"x": torch.randn(4, 8, dtype=torch.float64)}
    captured = capture(model, batch)
    program = emit_uniform(captured, strategy, 4)
    for errors in errors_of_a_step(model, batch, captured, program):
        assert set(errors) == {"loss", "up.weight", "up.bias", "angles"}
        assert max(errors.values()) < 1e-14
