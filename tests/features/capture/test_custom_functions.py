"""Custom autograd.Functions: one op each, whose backward is the user's, under every plan."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from support.models.functions import (
    ROWS,
    Clip,
    Gelu,
    Quantize,
    function_model,
    local_gelu,
)
from support.models.recompute import emit_recomputed
from support.processes.pool import Pools
from support.programs.local_programs import emit_uniform, errors_of_a_step
from torch import Tensor, nn

from meshfold.api import plan_captured
from meshfold.capture.pipeline import Captured, capture
from meshfold.codegen.emit.pipeline import emit_plan
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.ir.op_graph import Op
from meshfold.ir.options import CompileOptions
from meshfold.ir.strategy import UniformStrategy
from meshfold.validation.float64_mode import float64_everywhere

pytestmark = pytest.mark.xdist_group("custom functions")

EXACT = 1e-12
STRATEGIES = [
    UniformStrategy(dp=4),
    UniformStrategy(tp=2),
    UniformStrategy(tp=2, sequence_parallel=True),
    UniformStrategy(dp=2, zero=3),
    UniformStrategy(dp=2, tp=2, sequence_parallel=True, zero=3),
]


@cache
def captured() -> tuple[nn.Module, dict[str, Tensor], Captured]:
    model, batch = function_model()
    with float64_everywhere():
        return model, batch, capture(model, batch)


def ops_of(found: Captured) -> dict[str, Op]:
    """Ops that are Functions, by the name of the class."""
    return {
        op.target.rpartition(":")[2]: op
        for region in found.graph.regions
        for op in region.graph.ops
        if op.custom is not None
    }


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.label)
def test_loss_and_gradients_are_those_of_one_process(
    strategy: UniformStrategy, recomputes: bool
) -> None:
    model, batch, found = captured()
    program = emit_uniform(found, strategy, ROWS)
    program = emit_recomputed(program) if recomputes else program
    for errors in errors_of_a_step(model, batch, found, program):
        assert max(errors.values()) < EXACT


def test_scheduled_programs_run_their_backward_too() -> None:
    model, batch, found = captured()
    pins = {"tp": 2, "dp": 2, "sp": 1, "zero": 2, "micro_chunks": 1, "collective_matmul": 0}
    options = CompileOptions(pins=pins, mode="scheduled")
    plan = plan_captured(found, "Stack", "local-cpux4", options)
    program = emit_plan(found.graph, plan)
    assert isinstance(program, EmittedProgram)
    for errors in errors_of_a_step(model, batch, found, program):
        assert max(errors.values()) < EXACT


def test_layers_that_call_the_same_functions_fold() -> None:
    graph = captured()[2].graph
    # The first layer's input needs no gradient.
    assert [i.region for i in graph.instances] == [0, 1, 1, 2]


def test_local_functions_of_one_name_are_two_ops() -> None:
    first, second = local_gelu(), local_gelu()
    x = torch.randn(4, 4, dtype=torch.float64)
    model = Model(lambda y: (first.apply(y) + second.apply(first.apply(y))).sum()).double()
    found = capture(model, {"x": x})
    names = [op.target.rpartition(".")[2] for op in ops_of(found).values()]
    assert names == ["Local", "Local#2"]
    program = emit_uniform(found, UniformStrategy(dp=2), 4)
    for errors in errors_of_a_step(model, {"x": x}, found, program):
        assert max(errors.values()) < EXACT


class Model(nn.Module):
    """A parameter on the batch, and a function of both."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight)


def test_an_argument_without_gradient_and_a_call_without_any() -> None:
    """A weight whose gradient is None stays where it is, and nothing flows out of no_grad."""

    def loss(y: Tensor) -> Tensor:
        with torch.no_grad():
            fixed = Gelu.apply(y)
        quantized, scale = Quantize.apply(y, 4)
        return (quantized * fixed + scale[:, None] + Clip.apply(y)).sum()

    model, batch = Model(loss).double(), {"x": torch.randn(4, 4, dtype=torch.float64)}
    found = capture(model, batch)
    program = emit_uniform(found, UniformStrategy(dp=2), 4)
    for errors in errors_of_a_step(model, batch, found, program):
        assert max(errors.values()) < EXACT


@pytest.mark.multiprocess
@pytest.mark.slow
def test_stages_train_as_one_process(pools: Pools) -> None:
    losses = "support.programs.emit:function_losses"
    (expected,) = pools.run(1, losses, {})
    assert len(set(expected)) == 3
    for found in pools.run(2, losses, {"pp": 2, "microbatches": 2}):
        assert found == pytest.approx(expected, rel=EXACT)
