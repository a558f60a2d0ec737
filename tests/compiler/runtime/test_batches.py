"""Batches, global or local, and the ones that do not fit."""

from typing import Any

import pytest
import torch
from support.programs.local_programs import Rank, capture, emit_uniform, on_ranks, stack_model
from torch import Tensor, nn

from meshfold.errors import OptionError
from meshfold.ir.spmd import INVARIANT
from meshfold.ir.strategy import UniformStrategy

DP = UniformStrategy(dp=2)


def run(body: Any) -> list[Any]:
    model, batch = stack_model(2)
    captured = capture(model, batch)
    program = emit_uniform(captured, DP, 4)
    return on_ranks(model, captured, program, lambda rank: body(rank, model, batch))


def parts(batch: dict[str, Tensor], rank: Rank) -> dict[str, Tensor]:
    return {name: value.chunk(2)[rank.mesh.rank] for name, value in batch.items()}


def test_global_local_and_mixed_batches_give_one_loss() -> None:
    def body(rank: Rank, model: nn.Module, batch: dict[str, Tensor]) -> list[float]:
        local = parts(batch, rank)
        mixed = {"x": batch["x"], "target": local["target"]}
        return [float(rank.loss(b).detach()) for b in (batch, local, mixed)]

    model, batch = stack_model(2)
    expected = float(model(**batch).detach())
    for losses in run(body):
        assert losses == pytest.approx([expected] * 3, abs=1e-14)


def test_an_input_that_is_wanted_whole_is_gathered_once() -> None:
    def body(rank: Rank, model: nn.Module, batch: dict[str, Tensor]) -> tuple[bool, int]:
        local = rank.reader.read(parts(batch, rank))
        whole = (INVARIANT,)
        same = torch.equal(local("x", whole), batch["x"]) and torch.equal(
            local("x", whole), batch["x"]
        )
        return same, len(rank.mesh.log)

    assert run(body) == [(True, 1), (True, 1)]


def _made_without_gradients() -> Tensor:
    with torch.inference_mode():
        return torch.ones(4, 8, dtype=torch.float64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda b: b | {"x": b["x"][:3]},
            r"x has shape \[3, 8\]; the program takes \[4, 8\] for the global batch or \[2, 8\]",
        ),
        (lambda b: b | {"x": b["x"].float()}, "x has dtype float32; the program was captured with"),
        (lambda b: {"x": b["x"]}, "the batch has tensors x; the program was captured with target"),
        (lambda b: b | {"mask": b["x"]}, "the batch has tensors mask, target, x; the program"),
        (lambda b: b | {"x": b["x"].to("meta")}, "x is on the meta device and has no values"),
        (lambda b: b | {"x": _made_without_gradients()}, r"inference_mode\(\), .*; pass x.clone"),
        (lambda b: b | {"x": b["x"].clone().requires_grad_()}, "x requires a gradient, .*detach"),
        (lambda b: b | {"scale": 2}, "argument scale=2 was not captured with this value"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(change: Any, message: str) -> None:
    def body(rank: Rank, model: nn.Module, batch: dict[str, Tensor]) -> None:
        with pytest.raises(OptionError, match=message):
            rank.reader.read(change(batch))

    run(body)
