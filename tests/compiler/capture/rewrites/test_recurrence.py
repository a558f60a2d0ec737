"""LSTM and GRU: shared by batch, with dropout between the layers that every plan draws alike."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from support.programs.local_programs import (
    Rank,
    emit_uniform,
    errors_of_a_step,
    local_part,
    on_ranks,
)
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from meshfold.capture.pipeline import Captured, capture
from meshfold.errors import CaptureError
from meshfold.ir.spmd import Shard
from meshfold.ir.strategy import UniformStrategy
from meshfold.passes.graph.without_dropout import exact
from meshfold.validation.alike_draws import without_dropout
from meshfold.validation.float64_mode import float64_everywhere

BATCH, LENGTH, WIDTH = 4, 3, 4
STRATEGIES = [UniformStrategy(), UniformStrategy(dp=4), UniformStrategy(dp=2, tp=2, zero=3)]


class Tagger(nn.Module):
    """Two layers in both directions and one LSTM with a state that is read, dropout between."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True, dropout=dropout)
        self.lstm = nn.LSTM(2 * WIDTH, WIDTH, 3, dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.gru(x)
        z, (h, c) = self.lstm(y.transpose(0, 1))
        loss: Tensor = (z.square().mean() + (h * c).square().mean()) * 10.0
        return loss


@cache
def captured(dropout: float) -> tuple[nn.Module, dict[str, Tensor], Captured]:
    torch.manual_seed(0)
    model = Tagger(dropout).double()
    batch = {"x": torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)}
    with float64_everywhere():
        return model, batch, capture(model, batch)


def targets(dropout: float) -> list[str]:
    regions = captured(dropout)[2].graph.regions
    return [op.target for region in regions for op in region.graph.ops]


def test_dropout_is_an_op_between_layers() -> None:
    assert targets(0.0).count("aten.lstm.input") == targets(0.0).count("aten.gru.input") == 1
    assert targets(0.5).count("aten.gru.input") == 2
    assert targets(0.5).count("aten.lstm.input") == 3
    assert targets(0.5).count("aten.dropout.default") == 3


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("strategy", STRATEGIES[:2], ids=lambda s: s.label)
def test_without_chance_ranks_compute_what_one_process_computes(
    dropout: float, strategy: UniformStrategy
) -> None:
    model, batch, found = captured(dropout)
    found = replace(found, graph=exact(found.graph))
    with without_dropout():
        loss = model(**batch)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
    named = dict(zip((n for n, _ in model.named_parameters()), gradients, strict=True))
    program = emit_uniform(found, strategy, BATCH)
    for errors in errors_of_a_step(model, batch, found, program, (loss.detach(), named)):
        assert max(errors.values()) < 1e-12


def test_every_plan_draws_the_same() -> None:
    model, batch, found = captured(0.5)

    def step(rank: Rank) -> tuple[Tensor, dict[str, Tensor]]:
        loss = rank.loss(batch, (5, 7))
        loss.backward()
        return loss.detach(), {n: p.grad for n, p in rank.parameters.items() if p.grad is not None}

    (loss, expected), *_ = on_ranks(model, found, emit_uniform(found, STRATEGIES[0], BATCH), step)
    certain = replace(found, graph=exact(found.graph))
    alone = emit_uniform(certain, STRATEGIES[0], BATCH)
    assert abs(loss - on_ranks(model, certain, alone, step)[0][0]) > 1e-3, "nothing is dropped"
    for strategy in STRATEGIES[1:]:
        program = emit_uniform(found, strategy, BATCH)

        def errors(rank: Rank, program=program) -> list[float]:  # type: ignore[no-untyped-def]
            mine, gradients = step(rank)
            parts = ((n, local_part(program, n, g, rank.mesh)) for n, g in expected.items())
            return [
                float(abs(mine - loss)),
                *(float((gradients[n] - part).abs().max()) for n, part in parts),
            ]

        for of_rank in on_ranks(model, found, program, errors):
            assert max(of_rank) < 1e-12


def test_the_batch_is_shared() -> None:
    program = emit_uniform(captured(0.0)[2], STRATEGIES[1], BATCH)
    inputs = {
        typing.inputs[0][0]
        for region in program.regions
        for op, typing in zip(
            program.folded.regions[region.region].graph.ops, region.typing.ops, strict=True
        )
        if op.target in ("aten.lstm.input", "aten.gru.input")
    }
    assert inputs == {Shard(0), Shard(1)}


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(pack_padded_sequence(x, torch.tensor([3, 2, 1, 1])))
        loss: Tensor = y.data.square().mean()
        return loss


def test_packed_sequences_are_refused_in_one_line() -> None:
    with pytest.raises(CaptureError, match="packed") as error:
        capture(Packed(), {"x": torch.randn(LENGTH, BATCH, WIDTH)})
    assert "\n" not in str(error.value)
