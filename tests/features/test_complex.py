"""Complex values inside a model, on simulated ranks."""

from typing import Any

import pytest
import torch
from support.processes.pool import Pools
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


class Rotary(nn.Module):
    """Queries turned by position, as Meta writes it for Llama and DeepSeek."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(16, 32)
        self.wo = nn.Linear(32, 16)
        freqs = torch.outer(torch.arange(6.0), 1.0 / 10.0 ** torch.arange(0, 1, 0.25))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(freqs), freqs))

    def forward(self, x: Tensor) -> Tensor:
        q = self.wq(x).unflatten(-1, (4, 8))
        turned = torch.view_as_complex(q.double().reshape(*q.shape[:-1], -1, 2))
        turned = turned * self.freqs_cis.view(1, 6, 1, 4)
        y = torch.view_as_real(turned).flatten(3).type_as(x)
        return self.wo(y.flatten(2)).square().mean()


class Diagonal(nn.Module):
    """A diagonal state space (S4D): a kernel of complex exponentials, convolved by FFT."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.turn = nn.Parameter(torch.rand(8, 4)), nn.Parameter(torch.rand(8, 4))
        self.mix = nn.Parameter(torch.randn(8, 4, 2))
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        a = -torch.exp(self.rate) + 1j * self.turn
        powers = torch.exp(a.unsqueeze(-1) * torch.arange(length))
        c = torch.view_as_complex(self.mix) * (torch.exp(a) - (1.0 - 0.5j)) / a
        kernel = 2 * torch.einsum("hn,hnl->hl", c, powers).real
        signal = torch.fft.rfft(x.transpose(1, 2), n=2 * length)
        y = torch.fft.irfft(torch.fft.rfft(kernel, n=2 * length) * signal, n=2 * length)
        return self.out(y[..., :length].transpose(1, 2)).square().mean()


@pytest.mark.parametrize("strategy", [UniformStrategy(dp=2), UniformStrategy(tp=2)])
def test_complex_numbers_in_the_models_code_are_kept(strategy: UniformStrategy) -> None:
    model, batch = Diagonal().double(), {"x": torch.randn(4, 6, 8, dtype=torch.float64)}
    captured = capture(model, batch)
    program = emit_uniform(captured, strategy, 4)
    for errors in errors_of_a_step(model, batch, captured, program):
        assert max(errors.values()) < 1e-13


@pytest.mark.parametrize("strategy", [UniformStrategy(dp=2), UniformStrategy(tp=2)])
def test_heads_and_samples_are_turned_where_they_are(strategy: UniformStrategy) -> None:
    model, batch = Rotary().double(), {"x": torch.randn(4, 6, 16, dtype=torch.float64)}
    captured = capture(model, batch)
    program = emit_uniform(captured, strategy, 4)
    for region in program.regions:
        graph = program.folded.regions[region.region].graph
        for op, typing in zip(graph.ops, region.typing.ops, strict=True):
            if "view_as" in op.target or op.target == "aten.mul.Tensor":
                assert typing.outputs[0][0].is_shard, op.target
    for errors in errors_of_a_step(model, batch, captured, program):
        assert max(errors.values()) < 1e-13


@pytest.mark.parametrize("strategy", [UniformStrategy(dp=2), UniformStrategy(tp=2)])
def test_complex_values_and_their_gradients(strategy: UniformStrategy) -> None:
    model, batch = Rotated().double(), {"x": torch.randn(4, 8, dtype=torch.float64)}
    captured = capture(model, batch)
    program = emit_uniform(captured, strategy, 4)
    for errors in errors_of_a_step(model, batch, captured, program):
        assert set(errors) == {"loss", "up.weight", "up.bias", "angles"}
        assert max(errors.values()) < 1e-14


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("pins", "mode"),
    [
        ({"pp": 2, "microbatches": 1}, "eager"),
        ({"pp": 2, "microbatches": 2, "schedule": "zero_bubble"}, "scheduled"),
        ({"dp": 2, "zero": 3, "microbatches": 1}, "scheduled"),
        ({"tp": 2, "microbatches": 1}, "scheduled"),
    ],
)
def test_products_with_complex_parameters(pools: Pools, pins: dict[str, Any], mode: str) -> None:
    """Their gradients are of the conjugates."""
    for worst in pools.run(2, "support.processes.complex_steps:worst_error", pins, mode):
        assert worst < 1e-13
