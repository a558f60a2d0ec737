"""Frozen parameters that forward moves, as MoCo and BYOL move the encoder of their targets: every
plan moves them as one process does."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from support.programs.linears import assert_trains_alike
from support.programs.local_programs import Rank, emit_uniform, on_ranks
from torch import Tensor, nn
from torch.nn import functional

import meshfold
from meshfold.capture.pipeline import Captured, capture
from meshfold.errors import CaptureError
from meshfold.ir.strategy import UniformStrategy
from meshfold.validation.float64_mode import float64_everywhere

BATCH, WIDTH, KEPT = 4, 8, 0.9
STRATEGIES = [
    UniformStrategy(dp=2, zero=3),
    UniformStrategy(tp=2, sequence_parallel=True),
    UniformStrategy(dp=2, tp=2),
]

Move = Callable[[nn.Parameter, nn.Parameter], None]


def by_data(target: nn.Parameter, online: nn.Parameter) -> None:
    target.data = target.data * KEPT + online.data * (1.0 - KEPT)


def in_place(target: nn.Parameter, online: nn.Parameter) -> None:
    target.mul_(KEPT).add_(online, alpha=1.0 - KEPT)


def by_lerp(target: nn.Parameter, online: nn.Parameter) -> None:
    target.data.lerp_(online.data, 1.0 - KEPT)


def copied(target: nn.Parameter, online: nn.Parameter) -> None:
    target.copy_(KEPT * target + (1.0 - KEPT) * online)


class Bootstrapped(nn.Module):
    """A trained encoder against the same one some steps ago."""

    def __init__(self, move: Move) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.move = move

    def forward(self, x: Tensor) -> Tensor:
        guess = functional.normalize(self.head(self.online(x)), dim=-1)
        with torch.no_grad():
            for online, target in zip(
                self.online.parameters(), self.target.parameters(), strict=True
            ):
                self.move(target, online)
            wanted = functional.normalize(self.target(x + 0.5), dim=-1)
        return 2 - 2 * (guess * wanted).sum(-1).mean()


@cache
def captured(move: Move) -> tuple[nn.Module, dict[str, Tensor], Captured]:
    torch.manual_seed(0)
    model = Bootstrapped(move).double()
    batch = {"x": torch.randn(BATCH, 4, dtype=torch.float64)}
    with torch.no_grad():
        for parameter in model.target.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    with float64_everywhere():
        return model, batch, capture(model, batch)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.label)
@pytest.mark.parametrize("move", [by_data, in_place, by_lerp, copied])
def test_ranks_move_them_as_one_process_does(move: Move, strategy: UniformStrategy) -> None:
    model, batch, found = captured(move)
    moved = {b.name for b in found.graph.buffers}
    assert moved == {f"target.{name}" for name, _ in model.target.named_parameters()}
    right = copy.deepcopy(model)
    losses = [right(**batch).detach() for _ in range(3)]

    def steps(rank: Rank) -> tuple[list[Tensor], dict[str, Tensor]]:
        return [rank.loss(batch).detach() for _ in losses], rank.buffers

    for mine, buffers in on_ranks(model, found, emit_uniform(found, strategy, BATCH), steps):
        torch.testing.assert_close(mine, losses, rtol=0, atol=1e-14)
        for name, buffer in buffers.items():
            torch.testing.assert_close(buffer, right.get_parameter(name).data, rtol=0, atol=1e-14)


@pytest.mark.parametrize("move", [by_data, in_place])
def test_they_are_buffers_of_the_compiled_model(move: Move) -> None:
    assert_trains_alike(Bootstrapped(move))
    model = Bootstrapped(move)
    compiled = meshfold.compile(copy.deepcopy(model), "local-cpux1", {"x": torch.randn(BATCH, 4)})
    assert "target.0.weight" in dict(compiled.named_buffers())
    assert [*compiled.state_dict()] == [*model.state_dict()]
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert [name for name, _ in compiled.named_parameters()] == trained


def of_what_is_shared(target: nn.Parameter, online: nn.Parameter) -> None:
    value = target.data * KEPT
    target.data = value
    value.add_(online.data)


def of_another_shape(target: nn.Parameter, online: nn.Parameter) -> None:
    target.data = torch.cat([target.data, online.data])


@pytest.mark.parametrize(
    ("move", "text"),
    [
        (of_what_is_shared, "a write to what Tensor.data was set to changes both"),
        (of_another_shape, "Tensor.data = inside of forward is lost in a graph"),
    ],
)
def test_writes_that_a_graph_cannot_hold_are_refused(move: Any, text: str) -> None:
    with pytest.raises(CaptureError, match=text):
        capture(Bootstrapped(move), {"x": torch.randn(BATCH, 4)})


def test_trained_parameters_stay_as_they_are() -> None:
    model = Bootstrapped(in_place)
    model.target.requires_grad_(True)
    with pytest.raises(
        CaptureError, match="changes a tensor inside torch.no_grad whose gradient is used"
    ):
        capture(model, {"x": torch.randn(BATCH, 4)})


def test_few_digits_would_lose_small_changes() -> None:
    with pytest.raises(CaptureError, match="compile with precision='model'"):
        capture(Bootstrapped(in_place), {"x": torch.randn(BATCH, 4)}, precision="bf16")
