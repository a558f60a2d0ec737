"""Models that draw random numbers: every plan draws what one process draws."""

from dataclasses import replace
from functools import cache

import pytest
from support.models.draws import ROWS, LayerDrop, drawing_model
from support.models.recompute import emit_recomputed
from support.processes.pool import Pools
from support.programs.local_programs import (
    Rank,
    emit_uniform,
    errors_of_a_step,
    local_part,
    on_ranks,
    one_process,
)
from torch import Tensor, nn

from meshfold.capture.pipeline import Captured, capture
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import CaptureError
from meshfold.ir.op_graph import DRAWS
from meshfold.ir.spmd import INVARIANT, Shard
from meshfold.ir.strategy import UniformStrategy
from meshfold.passes.graph.without_dropout import exact
from meshfold.passes.split.microbatch import MicrobatchGraphs
from meshfold.validation.alike_draws import alike_draws
from meshfold.validation.float64_mode import float64_everywhere

# One worker captures the model once.
pytestmark = pytest.mark.xdist_group("random ops")

EXACT = 1e-12
ALONE = UniformStrategy()
STRATEGIES = [
    UniformStrategy(dp=4),
    UniformStrategy(tp=2),
    UniformStrategy(tp=2, sequence_parallel=True),
    UniformStrategy(dp=2, zero=3),
    UniformStrategy(dp=2, tp=2, sequence_parallel=True, zero=3),
]


@cache
def captured() -> tuple[nn.Module, dict[str, Tensor], Captured]:
    model, batch = drawing_model()
    with float64_everywhere():
        return model, batch, capture(model, batch)


@cache
def program_of(strategy: UniformStrategy) -> EmittedProgram:
    return emit_uniform(captured()[2], strategy, ROWS)


def step(rank: Rank, number: int = 7) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients on one rank."""
    loss = rank.loss(captured()[1], (5, number))
    loss.backward()
    found = {n: p.grad for n, p in rank.parameters.items() if p.grad is not None}
    return loss.detach(), found


@cache
def reference() -> tuple[Tensor, dict[str, Tensor]]:
    model, _, found = captured()
    return on_ranks(model, found, program_of(ALONE), step)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.label)
@pytest.mark.parametrize("recomputes", [False, True])
def test_loss_and_gradients_are_those_of_one_rank(
    strategy: UniformStrategy, recomputes: bool
) -> None:
    model, _, found = captured()
    program = program_of(strategy)
    program = emit_recomputed(program) if recomputes else program
    expected_loss, expected = reference()

    def body(rank: Rank) -> tuple[float, dict[str, float]]:
        loss, gradients = step(rank)
        return abs(float(loss - expected_loss)), {
            n: float((g - local_part(program, n, expected[n], rank.mesh)).abs().max())
            for n, g in gradients.items()
        }

    for loss_error, errors in on_ranks(model, found, program, body):
        assert loss_error < EXACT
        assert set(errors) == set(expected) == {n for n, _ in model.named_parameters()}
        assert max(errors.values()) < EXACT


@pytest.mark.parametrize("strategy", [ALONE, *STRATEGIES[1:4]], ids=lambda s: s.label)
def test_the_exact_program_draws_what_the_model_is_given(strategy: UniformStrategy) -> None:
    model, batch, found = captured()
    found = replace(found, graph=exact(found.graph))
    with alike_draws():
        right = one_process(model, batch)
    for errors in errors_of_a_step(model, batch, found, emit_uniform(found, strategy, ROWS), right):
        assert max(errors.values()) < EXACT


def test_steps_and_layers_draw_anew() -> None:
    model, _, found = captured()
    first, again, other = (
        on_ranks(model, found, program_of(ALONE), lambda rank, n=n: step(rank, n)[0])[0]
        for n in (1, 1, 2)
    )
    assert first == again != other


def test_noise_of_the_batch_is_sharded_with_it() -> None:
    """A rank makes its rows alone; of what all rows share, all of it."""
    program = program_of(STRATEGIES[0])
    found = [
        (op.args[0], typing.outputs[0][0])
        for region in program.regions
        for op, typing in zip(
            program.folded.regions[region.region].graph.ops, region.typing.ops, strict=True
        )
        if op.target in DRAWS
    ]
    assert {size[0] for size, kind in found if kind == Shard(0)} == {ROWS}
    assert {size for size, kind in found if kind == INVARIANT} == {(8,), (4, 1), (4, 8)}


def test_noise_that_only_looks_like_the_batch_is_no_part_of_it() -> None:
    """One number per channel, of which there are as many as rows, is drawn before all layers."""
    graphs = MicrobatchGraphs(captured()[2].graph, resolve_cluster("local-cpu", 2), ROWS)
    sizes = {
        (op.args[0], op.draw.microbatches if op.draw else 1)
        for region in graphs.graph(2).regions
        for op in region.graph.ops
        if op.target in DRAWS
    }
    assert {size for size, count in sizes if count == 1} == {(8,), (4, 1), (4, 8)}
    assert {size[0] for size, count in sizes if count == 2} == {ROWS // 2}


def test_a_branch_on_a_draw_is_refused_in_one_line() -> None:
    model, batch = drawing_model()
    with pytest.raises(CaptureError, match="a Python branch depends on the value of a tensor") as e:
        capture(LayerDrop(model), batch)
    assert "draws.py:" in str(e.value) and "\n" not in str(e.value)


LOSSES = "support.programs.emit:drawing_losses"
PLANS = {
    "4 microbatches x dp2": (2, {"dp": 2, "microbatches": 4}),
    "pp2": (2, {"pp": 2, "microbatches": 2}),
}


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_microbatches_and_stages_train_as_one_process(pools: Pools, name: str) -> None:
    """The rows of the full batch say what is drawn. Losses after steps show gradients, too."""
    (expected,) = pools.run(1, LOSSES, {})
    assert len(set(expected)) == 3
    num_ranks, pins = PLANS[name]
    for losses in pools.run(num_ranks, LOSSES, pins):
        assert losses == pytest.approx(expected, rel=EXACT)
