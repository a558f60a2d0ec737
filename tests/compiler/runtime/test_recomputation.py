"""Regions that run again in the backward: the same numbers, less kept, the same order."""

import operator
import weakref
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.models.hugging_face import families
from support.models.recompute import (
    captured_dropping,
    dropping_model,
    emit_recomputed,
    plain_program,
)
from support.programs.local_programs import (
    Rank,
    capture,
    emit_uniform,
    gradients,
    local_part,
    on_ranks,
)
from support.programs.local_programs import stack_model as stack
from torch import Tensor, fx, nn

from meshfold.capture.pipeline import Captured
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.errors import MeshfoldError
from meshfold.ir.strategy import UniformStrategy
from meshfold.passes.price.recompute import recomputed_prefix
from meshfold.passes.rules.ops.experts import DISPATCH_OPS

# One worker captures each family once.
pytestmark = pytest.mark.xdist_group("recomputation")

EXACT = 1e-12
ALONE = UniformStrategy()
ZERO3 = UniformStrategy(dp=2, zero=3)
TP = UniformStrategy(tp=2)
TP_SP = UniformStrategy(tp=2, sequence_parallel=True)
STRATEGIES = [(UniformStrategy(dp=2), False), (ZERO3, True), (TP, False), (TP_SP, True)]
"""(strategy, whether the layers alone are recomputed)."""


@cache
def reference(family: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one process that recomputes nothing."""
    model, batch = dropping_model(family)
    program = plain_program(family, ALONE)

    def body(rank: Rank) -> tuple[Tensor, dict[str, Tensor]]:
        loss = rank.loss(batch, (5, 7))
        loss.backward()
        return loss.detach(), {
            n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in rank.parameters.items()
        }

    return on_ranks(model, captured_dropping(family), program, body)[0]


@pytest.mark.parametrize("family", families("gpt2", "llama"))
@pytest.mark.parametrize(("strategy", "only_layers"), STRATEGIES, ids=str)
def test_loss_and_every_gradient_equal_one_process(
    family: str, strategy: UniformStrategy, only_layers: bool
) -> None:
    """With dropout and tied weights."""
    model, batch = dropping_model(family)
    program = emit_recomputed(plain_program(family, strategy), only_layers=only_layers)
    expected_loss, expected = reference(family)

    def body(rank: Rank) -> tuple[float, float]:
        loss = rank.loss(batch, (5, 7))
        loss.backward()
        errors = [
            float((p.grad - local_part(program, n, expected[n], rank.mesh)).abs().max())
            for n, p in rank.parameters.items()
            if p.grad is not None
        ]
        return float((loss.detach() - expected_loss).abs()), max(errors)

    for loss_error, gradient_error in on_ranks(model, captured_dropping(family), program, body):
        assert loss_error <= EXACT
        assert gradient_error <= EXACT


class NodeLog(nn.Module):
    """A region graph that notes the ops of each of its runs."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.graph = graph
        self.runs: list[list[str]] = []

    def forward(self, *arguments: Any) -> Any:
        self.runs.append(names := [])
        log = self

        class Run(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                if n.op == "call_function" and n.target not in (operator.getitem, getattr):
                    names.append(n.name)
                return super().run_node(n)

        return Run(log.graph).run(*arguments)


@pytest.mark.parametrize("family", families("gpt2", "llama"))
def test_the_second_run_stops_where_the_price_says(family: str) -> None:
    model, batch = dropping_model(family)
    program = emit_recomputed(plain_program(family, ALONE))
    logs = [NodeLog(region.graph) for region in program.regions]
    logged = tuple(replace(r, graph=g) for r, g in zip(program.regions, logs, strict=True))  # type: ignore[arg-type]

    def body(rank: Rank) -> None:
        runner = rank.runner
        runner.program = replace(program, regions=logged)
        instances = map(runner.program.instance, range(len(program.programs)))
        runner.training_modes = tuple(map(runner.training_mode, instances))
        rank.loss(batch).backward()

    on_ranks(model, captured_dropping(family), program, body)
    for k, (region, log) in enumerate(zip(program.regions, logs, strict=True)):
        graph = program.folded.regions[region.region].graph
        again = log.runs[program.programs.count(k) :]
        # Where no axis shares experts, rows do not travel and nothing is written for it.
        is_written = [op.target not in DISPATCH_OPS for op in graph.ops]
        assert len(log.runs[0]) == sum(is_written)
        prepared = recomputed_prefix(graph).num_prepared
        assert all(run == log.runs[0][: sum(is_written[:prepared])] for run in again)
        assert len(again) == (program.programs.count(k) if prepared else 0)


@cache
def toy() -> tuple[nn.Module, dict[str, Tensor], Captured]:
    """A stack of four layers, half of which is dropped."""
    model, batch = stack(4, dropout=0.5)
    return model, batch, capture(model, batch)


def test_steps_that_overlap_draw_their_own_numbers() -> None:
    """Two forwards, then both backwards: each recomputes with the masks of its own step."""
    model, batch, found = toy()
    plain = emit_uniform(found, ZERO3, 4)

    def body(rank: Rank) -> list[Tensor]:
        losses = []
        for step in range(2):
            losses.append(rank.loss(batch, (3, step)))
        torch.stack(losses).sum().backward()
        return [p.grad for p in rank.parameters.values() if p.grad is not None]

    expected = on_ranks(model, found, plain, body)
    for mine, theirs in zip(
        on_ranks(model, found, emit_recomputed(plain), body), expected, strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(
    ("strategy", "more"),
    [(TP, {"all_reduce": 1}), (TP_SP, {"all_gather": 2, "reduce_scatter": 1}), (ZERO3, {})],
    ids=["tp", "tp+sp", "zero3"],
)
def test_the_collective_that_ends_a_layer_does_not_run_again(
    strategy: UniformStrategy, more: dict[str, int]
) -> None:
    """Of the two pairs of products in a layer; ZeRO-3 gathers for the backward in any case."""
    model, batch = dropping_model("llama")
    plain = plain_program("llama", strategy)

    def body(rank: Rank) -> Counter[str]:
        rank.loss(batch).backward()
        return Counter(kind for kind, _ in rank.mesh.log)

    def collectives(program: EmittedProgram) -> Counter[str]:
        first, second = on_ranks(model, captured_dropping("llama"), program, body)
        assert first == second
        return first

    added = collectives(emit_recomputed(plain, only_layers=True)) - collectives(plain)
    assert added == {kind: 2 * count for kind, count in more.items()}


class Counting(nn.Module):
    """Layers that scale by how often they ran: a buffer that a step reads and updates."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8).double() for _ in range(2))
        self.register_buffer("runs", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            self.runs.mul_(2.0)
            x = torch.tanh(layer(x) * self.runs.clone())
        return x.square().mean()


def test_a_second_run_reads_buffers_as_they_were() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, batch = Counting(), {"x": torch.randn(4, 8, dtype=torch.float64)}
    found = capture(model, batch)
    assert any(region.graph.mutations for region in found.graph.regions)
    program = emit_recomputed(emit_uniform(found, UniformStrategy(dp=2), 4))
    model.runs.fill_(1.0)

    def body(rank: Rank) -> tuple[dict[str, Tensor], float]:
        rank.loss(batch).backward()
        whole = {n: p.grad for n, p in rank.parameters.items() if p.grad is not None}
        return whole, float(rank.buffers["runs"])

    results = on_ranks(model, found, program, body)
    expected = gradients(model, batch)
    for mine, runs in results:
        assert runs == 4.0
        for name, gradient in expected.items():
            assert torch.allclose(mine[name], gradient, rtol=0.0, atol=EXACT)


def test_what_arrives_must_not_change_before_backward() -> None:
    model, batch, found = toy()
    program = emit_recomputed(emit_uniform(found, ALONE, 4))

    def body(rank: Rank) -> None:
        loss = rank.loss(batch)
        with torch.no_grad():
            for parameter in rank.parameters.values():
                parameter.add_(1.0)
        with pytest.raises(MeshfoldError, match="changed in place between forward and backward"):
            loss.backward()

    on_ranks(model, found, program, body)


def test_what_autocast_was_in_forward_it_is_in_the_second_run() -> None:
    model, batch = stack()
    model, batch = model.float(), {name: x.float() for name, x in batch.items()}
    found = capture(model, batch)
    plain = emit_uniform(found, ALONE, 4)

    def body(rank: Rank) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = rank.loss(batch)
        loss.backward()
        return [p.grad for p in rank.parameters.values() if p.grad is not None]

    (expected,) = on_ranks(model, found, plain, body)
    (mine,) = on_ranks(model, found, emit_recomputed(plain), body)
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


def test_nothing_outlives_the_loss_and_nothing_is_kept_without_gradients() -> None:
    model, batch, found = toy()
    program = emit_recomputed(emit_uniform(found, ZERO3, 4))
    kept: list[weakref.ref[Tensor]] = []

    def body(rank: Rank) -> None:
        kept.append(weakref.ref(rank.loss(batch)))
        with torch.no_grad():
            assert rank.loss(batch).grad_fn is None

    on_ranks(model, found, program, body)
    assert [ref() for ref in kept] == [None, None]


def test_the_program_says_what_runs_again() -> None:
    _, _, found = toy()
    plain = emit_uniform(found, ZERO3, 4)
    program = emit_recomputed(plain, only_layers=True)
    assert "; runs again in backward\n" in program.text(0)
    assert program.digest != plain.digest
