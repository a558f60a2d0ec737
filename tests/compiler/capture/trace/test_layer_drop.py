"""LayerDrop: layers that a Python branch on a draw skips, in the ways that people write it."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from unittest import mock

import pytest
import torch
from support.programs.local_programs import Rank, emit_uniform, local_part, on_ranks
from torch import Tensor, nn

from meshfold.capture.pipeline import Captured, capture
from meshfold.errors import CaptureError
from meshfold.ir.strategy import UniformStrategy
from meshfold.passes.graph.without_dropout import exact
from meshfold.validation.alike_draws import alike_draws
from meshfold.validation.float64_mode import float64_everywhere

BATCH, WIDTH, LAYERS, DROP = 4, 8, 4, 0.5
STRATEGIES = [
    UniformStrategy(dp=4),
    UniformStrategy(tp=2, sequence_parallel=True),
    UniformStrategy(dp=2, tp=2, zero=3),
]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: float) -> tuple[Tensor, None]:
        return x + scale * self.down(torch.tanh(self.up(x))), None


def by_continue(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        if layer.training:
            dropout_probability = torch.rand([])
            if dropout_probability < DROP:
                continue
        x = layer(x, 0.5)[0]
    return x


def by_flag(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        skip_the_layer = layer.training and torch.rand([]) < DROP
        if not skip_the_layer:
            outputs = layer(x, 0.5)
            x = outputs[0]
        if skip_the_layer:
            outputs = (None, None)
    return x


def by_keeping(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        if not layer.training or torch.rand(1) > DROP:
            x, _ = layer(x, scale=0.5)
    return x


def with_an_other_side(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = 2.0 * x if torch.rand([]) < DROP else layer(x, 0.5)[0]
    return x


def with_work_of_its_own(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        if torch.rand([]) < DROP:
            continue
        x = torch.tanh(layer(x, 0.5)[0])
    return x


def without_a_layer(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return x if torch.rand([]) < DROP else x @ layers[0].up.weight[:WIDTH].T


def by_a_value(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return x if x.sum() < DROP else layers[0](x, 0.5)[0]


class Model(nn.Module):
    def __init__(self, run: Callable[[nn.ModuleList, Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(self.run(self.layers, x)).square().mean()
        return loss


@cache
def made(
    run: Callable[[nn.ModuleList, Tensor], Tensor],
) -> tuple[nn.Module, dict[str, Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model(run).double().train()
        return model, {"x": torch.randn(BATCH, WIDTH, dtype=torch.float64)}


@cache
def captured(run: Callable[[nn.ModuleList, Tensor], Tensor]) -> Captured:
    with float64_everywhere():
        return capture(*made(run))


def step(rank: Rank, number: int = 7) -> tuple[Tensor, dict[str, Tensor]]:
    loss = rank.loss(made(by_continue)[1], (5, number))
    loss.backward()
    found = {n: p.grad for n, p in rank.parameters.items() if p.grad is not None}
    return loss.detach(), found


def skipped(gradients: dict[str, Tensor]) -> tuple[bool, ...]:
    """Which layers got no gradient."""
    return tuple(not gradients[f"layers.{k}.up.weight"].any() for k in range(LAYERS))


@pytest.mark.parametrize("run", [by_continue, by_flag, by_keeping])
def test_one_rank_computes_what_the_model_does_with_its_draws(
    run: Callable[[nn.ModuleList, Tensor], Tensor],
) -> None:
    """Over steps: with some layers skipped and others not."""
    model, batch = made(run)
    program = emit_uniform(captured(run), UniformStrategy(), BATCH)
    seen = set()
    for number in range(4):
        ((loss, gradients),) = on_ranks(
            model, captured(run), program, lambda rank, n=number: step(rank, n)
        )
        draws = [torch.tensor(0.0 if skip else 1.0) for skip in skipped(gradients)]
        with mock.patch("torch.rand", side_effect=draws):
            right = model(**batch)
        names, parameters = zip(*model.named_parameters(), strict=True)
        found = torch.autograd.grad(right, parameters, allow_unused=True)
        assert abs(float(loss - right.detach())) < 1e-12
        for name, gradient in zip(names, found, strict=True):
            expected = torch.zeros_like(gradients[name]) if gradient is None else gradient
            assert float((gradients[name] - expected).abs().max()) < 1e-12
        seen.add(skipped(gradients))
    assert len(seen) > 1 and any(0 < sum(pattern) < LAYERS for pattern in seen)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.label)
def test_every_plan_skips_the_same(strategy: UniformStrategy) -> None:
    (model, _), found = made(by_continue), captured(by_continue)
    ((loss, expected),) = on_ranks(
        model, found, emit_uniform(found, UniformStrategy(), BATCH), step
    )
    program = emit_uniform(found, strategy, BATCH)

    def errors(rank: Rank) -> list[float]:
        mine, gradients = step(rank)
        parts = ((n, local_part(program, n, g, rank.mesh)) for n, g in expected.items())
        return [
            abs(float(mine - loss)),
            *(float((gradients[n] - part).abs().max()) for n, part in parts),
        ]

    for of_rank in on_ranks(model, found, program, errors):
        assert max(of_rank) < 1e-12


def test_the_exact_program_skips_what_the_model_skips_that_is_given_its_draws() -> None:
    (model, batch), found = made(by_flag), captured(by_flag)
    certain = replace(found, graph=exact(found.graph))
    program = emit_uniform(certain, UniformStrategy(), BATCH)
    ((loss, _),) = on_ranks(model, certain, program, step)
    with alike_draws():
        assert abs(float(loss - model(**batch).detach())) < 1e-12


def test_the_plan_says_that_layers_are_computed_in_any_case() -> None:
    notes = [note for note in captured(by_flag).graph.notes if note.startswith("LayerDrop")]
    assert notes and f"{LAYERS} layers are skipped by chance" in notes[0]
    assert not any("LayerDrop" in note for note in capture(*eval_model()).graph.notes)


def eval_model() -> tuple[nn.Module, dict[str, Tensor]]:
    return Model(by_flag).double().eval(), made(by_flag)[1]


@pytest.mark.parametrize(
    "run", [with_an_other_side, with_work_of_its_own, without_a_layer, by_a_value]
)
def test_other_branches_are_refused_in_one_line(
    run: Callable[[nn.ModuleList, Tensor], Tensor],
) -> None:
    model, batch = made(run)
    with pytest.raises(CaptureError, match="a Python branch depends on the value of a tensor") as e:
        capture(model, batch)
    assert "test_layer_drop.py:" in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("probability, runs", [(0, True), (0.0, True), (1.0, False), (1, False)])
def test_a_layer_that_is_never_or_always_skipped_is_no_choice(
    probability: float, runs: bool
) -> None:
    class Certain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if torch.rand(1) > probability:
                x = x + self.layer(x)
            return x.square().mean()

    graph = capture(Certain(), {"x": torch.randn(BATCH, WIDTH)}).graph
    targets = [op.target for region in graph.regions for op in region.graph.ops]
    assert targets.count("aten.linear.default") == 1 + runs
    assert not any("where" in target for target in targets)
    assert not any("LayerDrop" in note for note in graph.notes)
