"""Scheduled programs: the numbers of one process, whatever order their segments run in."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from support.models.hugging_face import families, tiny_model
from support.models.recompute import dropping_model
from support.processes.pool import Pools
from support.programs.local_programs import Rank, errors_of_a_step, on_ranks
from support.programs.memory import EmittedStep
from support.programs.schedules import (
    PINS,
    captured_family,
    emitted,
    matrix,
    plan_text,
    planned,
)

from meshfold.api import plan_captured
from meshfold.capture.pipeline import capture
from meshfold.codegen.emit.pipeline import emit_plan
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.codegen.program.region_schedule import ActionKind
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import MeshfoldError, OptionError
from meshfold.ir.options import CompileOptions
from meshfold.passes.graph.without_dropout import without_dropout
from meshfold.validation.float64_mode import float64_everywhere

pytestmark = pytest.mark.xdist_group("schedules")

EXACT = 1e-12
ON_PROCESSES = (
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("dp", "zero3", "tp+sp")),
    "zero3 x tp+sp",
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "pins"), matrix("llama"))
def test_loss_and_every_gradient_equal_one_process(family: str, pins: str) -> None:
    model, batch = tiny_model(family)
    with float64_everywhere():
        found = errors_of_a_step(model, batch, captured_family(family), emitted(family, pins))
    assert max(max(errors.values()) for errors in found) < EXACT


@pytest.mark.multiprocess
@pytest.mark.sampled(2)
@pytest.mark.parametrize("pins", ON_PROCESSES)
@pytest.mark.parametrize("family", families("llama"))
def test_the_same_on_processes(pools: Pools, family: str, pins: str) -> None:
    arguments = family, captured_family(family), plan_text(family, pins)
    found = pools.run(PINS[pins][0], "support.programs.emit:compare_step", *arguments)
    for loss_error, gradient_error, name, uneven in found:
        assert loss_error < EXACT and gradient_error < EXACT, name
        assert not uneven


def test_compare_step_would_see_a_wrong_gradient() -> None:
    """A W that is left out is a gradient that is missing."""
    model, batch = tiny_model("llama")
    program = emitted("llama", "tp")
    regions = [
        replace(
            region,
            schedule=replace(
                region.schedule,
                backward=tuple(
                    m for m in region.schedule.backward if m.kind is not ActionKind.WEIGHTS
                ),
            ),
        )
        for region in program.regions
        if region.schedule is not None
    ]
    broken = replace(program, regions=tuple(regions))
    with float64_everywhere():
        found = errors_of_a_step(model, batch, captured_family("llama"), broken)
    assert max(max(errors.values()) for errors in found) > 1e-3


@pytest.mark.parametrize("pins", ["tp+sp", "zero3 x tp+sp, again"])
def test_dropout_draws_the_same_numbers_in_both_modes(pins: str) -> None:
    model, batch = dropping_model("llama")
    with float64_everywhere():
        captured = capture(model, batch)
    num_processes, fixed = PINS[pins]
    losses, gradients = [], []
    for mode in ("eager", "scheduled"):
        options = CompileOptions(pins=fixed, mode=mode)
        cluster = resolve_cluster("local-cpu", num_processes)
        program = emit_plan(captured.graph, plan_captured(captured, "m", cluster, options))
        assert isinstance(program, EmittedProgram)
        assert without_dropout(program.folded) != program.folded

        def body(rank: Rank) -> tuple[float, list[torch.Tensor | None]]:
            loss = rank.loss(batch, (5, 7))
            loss.backward()
            return loss.item(), [p.grad for p in rank.parameters.values()]

        with float64_everywhere():
            found = on_ranks(model, captured, program, body)
        losses.append([loss for loss, _ in found])
        gradients.append([g for _, of_rank in found for g in of_rank])
    assert losses[0] == losses[1]
    for eager, scheduled in zip(*gradients, strict=True):
        assert (eager is None) == (scheduled is None)
        if eager is not None and scheduled is not None:
            assert torch.allclose(eager, scheduled, rtol=1e-11, atol=EXACT)


def step_of(pins: str) -> EmittedStep:
    model, batch = tiny_model("llama")
    return EmittedStep(model, captured_family("llama"), emitted("llama", pins), batch)


def test_a_second_backward_is_refused() -> None:
    loss = step_of("tp").forward()
    loss.backward(retain_graph=True)
    with pytest.raises(MeshfoldError, match="already run backward"):
        loss.backward()


def test_gradients_of_several_steps_add_up() -> None:
    step = step_of("zero3 x tp+sp")
    step.forward().backward()
    once = {name: p.grad.clone() for name, p in step.parameters.items() if p.grad is not None}
    step.forward().backward()
    for name, gradient in once.items():
        now = step.parameters[name].grad
        assert now is not None and torch.allclose(now, 2 * gradient, rtol=1e-12)


def test_without_gradients_nothing_is_kept() -> None:
    step = step_of("tp+sp")
    with torch.no_grad():
        assert not step.forward().requires_grad


@pytest.mark.parametrize("runs_backward", [True, False])
@pytest.mark.parametrize("pins", ["zero3 x tp+sp", "zero3 x tp+sp, again"])
def test_no_step_is_left_behind(pins: str, runs_backward: bool) -> None:
    step = step_of(pins)
    step.train()
    gc.collect()
    gc.disable()
    try:
        loss = step.forward()
        node = weakref.ref(loss.grad_fn)
        if runs_backward:
            loss.backward()
        del loss
        assert node() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("pins", ["dp", "zero3", "tp", "zero3 x tp+sp", "zero3 x tp+sp, again"])
def test_memory_is_that_of_eager_mode(pins: str) -> None:
    """What is counted of a step, with no room for gradients of weights to wait."""
    model, batch = tiny_model("llama")
    captured = captured_family("llama")
    program = emitted("llama", pins, capacity_bytes=0)
    eager = emit_plan(captured.graph, planned("llama", pins, "eager"))
    assert isinstance(eager, EmittedProgram)
    counted = [
        EmittedStep(model, captured, p, batch).counted_peak_bytes() for p in (program, eager)
    ]
    assert counted[0] <= 1.1 * counted[1]


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(OptionError, match="write auto, eager or scheduled"):
        CompileOptions(mode="lazy")  # type: ignore[arg-type]
