"""Parts of complex tensors that a model writes: gradients of one process, also on ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.programs.local_programs import emit_uniform, errors_of_a_step
from torch import Tensor, nn

from meshfold.capture.pipeline import capture
from meshfold.ir.strategy import UniformStrategy
from meshfold.validation.float64_mode import float64_everywhere

BATCH, CHANNELS, SIZE, MODES = 4, 4, 8, 3

Write = Callable[[Tensor, Tensor], Tensor]


class FourierOperator(nn.Module):
    """The layer of a Fourier neural operator: the lowest modes are multiplied, the others are 0."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.write = write
        self.lift = nn.Linear(1, CHANNELS)
        shape = (CHANNELS, CHANNELS, MODES, MODES)
        self.weight = nn.Parameter(0.3 * torch.randn(shape, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft2(self.lift(x).movedim(-1, 1))
        made = torch.einsum("bixy,ioxy->boxy", modes[..., :MODES, :MODES], self.weight)
        return torch.fft.irfft2(self.write(modes, made), s=x.shape[1:3]).pow(2).mean()


def a_corner(modes: Tensor, made: Tensor) -> Tensor:
    out = torch.zeros_like(modes)
    out[:, :, :MODES, :MODES] = made
    return out


def both_corners(modes: Tensor, made: Tensor) -> Tensor:
    out = modes * 0.5
    out[..., -MODES:, :MODES] = made.conj()
    out[:, :, 1, :MODES] = made[:, :, 0]
    return out


def steps(modes: Tensor, made: Tensor) -> Tensor:
    out = modes.clone()
    out[:, :, ::2][:, :, :MODES, :MODES] = made
    return out


@pytest.mark.parametrize("write", [a_corner, both_corners, steps])
@pytest.mark.parametrize(
    "strategy", [UniformStrategy(dp=2, zero=3), UniformStrategy(dp=1, tp=2)], ids=["zero3", "tp2"]
)
def test_parts_of_complex_tensors_have_gradients(write: Any, strategy: UniformStrategy) -> None:
    torch.manual_seed(0)
    model = FourierOperator(write).double()
    model.weight = nn.Parameter(model.weight.detach().to(torch.complex128))
    batch = {"x": torch.randn(BATCH, SIZE, SIZE, 1, dtype=torch.float64)}
    with float64_everywhere():
        captured = capture(model, batch)
    targets = {op.target for region in captured.graph.regions for op in region.graph.ops}
    assert "aten.view_as_real.default" in targets
    program = emit_uniform(captured, strategy, BATCH)
    for errors in errors_of_a_step(model, batch, captured, program):
        assert max(errors.values()) < 1e-12
