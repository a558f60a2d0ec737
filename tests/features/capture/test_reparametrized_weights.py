"""Spectral and weight norm, as pre-hooks and as parametrizations: every plan computes what one
process does, the buffers of the power iteration included."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from support.programs.local_programs import Rank, emit_uniform, local_part, on_ranks
from torch import Tensor, nn

import meshfold
from meshfold.capture.pipeline import Captured, capture
from meshfold.ir.strategy import UniformStrategy
from meshfold.validation.float64_mode import float64_everywhere

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")

BATCH, WIDTH = 4, 8
KINDS: dict[str, Callable[[Any], nn.Module]] = {
    "spectral hook": nn.utils.spectral_norm,
    "spectral parametrization": nn.utils.parametrizations.spectral_norm,
    "weight hook": nn.utils.weight_norm,
    "weight parametrization": nn.utils.parametrizations.weight_norm,
    "orthogonal parametrization": nn.utils.parametrizations.orthogonal,
}
STRATEGIES = [
    UniformStrategy(dp=2, zero=3),
    UniformStrategy(tp=2, sequence_parallel=True),
    UniformStrategy(dp=2, tp=2),
]


class Critic(nn.Module):
    """A convolution and two linears whose weights are computed of others."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        norm = KINDS[kind]
        is_spectral = "spectral" in kind
        self.conv = norm(nn.Conv1d(2, WIDTH, 3, padding=1)) if is_spectral else nn.Identity()
        self.up = norm(nn.Linear(WIDTH, WIDTH))
        self.down = norm(nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x) if x.shape[1] == 2 else x
        loss: Tensor = self.down(torch.tanh(self.up(x))).square().mean()
        return loss


def make(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Critic(kind).double()
        channels = 2 if "spectral" in kind else 4
        return model, {"x": torch.randn(BATCH, channels, WIDTH, dtype=torch.float64)}


@cache
def captured(kind: str) -> tuple[nn.Module, dict[str, Tensor], Captured]:
    model, batch = make(kind)
    with float64_everywhere():
        return model, batch, capture(model, batch)


@cache
def expected(kind: str) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients, and buffers after a step, of one process."""
    model, batch = make(kind)
    loss = model(**batch)
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, dict(model.named_buffers())


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.label)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_compute_what_one_process_computes(kind: str, strategy: UniformStrategy) -> None:
    model, batch, found = captured(kind)
    program = emit_uniform(found, strategy, BATCH)
    right, gradients, buffers = expected(kind)

    def body(rank: Rank) -> dict[str, float]:
        loss = rank.loss(batch)
        loss.backward()
        errors = {"loss": float((loss - right).detach().abs())}
        for name, parameter in rank.parameters.items():
            mine = local_part(program, name, gradients[name], rank.mesh)
            assert parameter.grad is not None
            errors[name] = float((parameter.grad - mine).abs().max())
        for name, buffer in rank.buffers.items():
            errors[name] = float((buffer - buffers[name]).abs().max())
        return errors

    for errors in on_ranks(model, found, program, body):
        assert set(errors) == {"loss", *gradients, *buffers}
        assert max(errors.values()) < 1e-12


def test_the_power_iteration_changes_its_buffers() -> None:
    model, _ = make("spectral hook")
    _, _, after = expected("spectral hook")
    assert all((after[n] - b).abs().max() > 1e-3 for n, b in model.named_buffers() if n[-1] == "u")


def test_weights_that_hooks_make_are_captured_after_a_step() -> None:
    """The weight has a history then, which no deepcopy takes."""
    model, batch = make("weight hook")
    model(**batch).backward()
    graph = capture(model, batch).graph
    assert {p.name for p in graph.parameters} == {n for n, _ in model.named_parameters()}


@pytest.mark.parametrize("kind", ["spectral hook", "spectral parametrization"])
def test_microbatches_iterate_once(kind: str) -> None:
    """What no sample has a part in is the same in all microbatches of a step."""
    model, batch = make(kind)
    options = meshfold.CompileOptions(pins={"microbatches": 2})
    compiled = meshfold.compile(model, "local-cpux1", batch, options=options)
    with float64_everywhere():
        loss = compiled.train_step(batch)
    right, gradients, buffers = expected(kind)
    assert (loss - right).abs() < 1e-12
    for name, parameter in compiled.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad - gradients[name]).abs().max() < 1e-12
    for name, buffer in compiled.named_buffers():
        assert (buffer - buffers[name]).abs().max() < 1e-12, name
