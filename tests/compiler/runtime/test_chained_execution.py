"""Chained regions send values in chunks: numbers, order of collectives, what is left behind."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from support.graphs.op_graphs import without_host
from support.models.hugging_face import tiny_model
from support.programs.local_programs import Rank, errors_of_a_step, on_ranks
from support.programs.memory import EmittedStep
from support.programs.schedules import PINS, captured_family, emitted, planned

from meshfold.api import plan_captured
from meshfold.capture.pipeline import Captured, capture
from meshfold.codegen.chained_chunks.boundaries import chunked_boundaries
from meshfold.codegen.emit.pass_pipeline import emit
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.codegen.program.region_schedule import ActionKind, RegionAction, RegionSchedule
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.simulation.step import simulate
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.validation.collective_order import collectives_of
from meshfold.validation.float64_mode import float64_everywhere

pytestmark = pytest.mark.xdist_group("schedules")

EXACT = 1e-12
LAYERS = 4
CASES = ("tp", "tp+sp", "zero3 x tp+sp")


@cache
def deep(family: str) -> Captured:
    """With enough layers that regions stand in line: also in T5, whose first and last differ."""
    model, batch = tiny_model(family, layers=LAYERS)
    with float64_everywhere():
        return capture(model, batch)


@cache
def plan_of(family: str, pins: str, parts: int = 2) -> Plan:
    """As planned for devices where overlap pays, as it does not while all wait for the host."""
    num_processes, fixed = PINS[pins]
    cluster = without_host(resolve_cluster("dgx-h100", num_processes))
    options = CompileOptions(pins={**fixed, "micro_chunks": parts}, mode="scheduled")
    return plan_captured(deep(family), family, cluster, options)


@cache
def program_of(family: str, pins: str, parts: int = 2) -> EmittedProgram:
    return emit(deep(family).graph, plan_of(family, pins, parts))


def cases() -> list[object]:
    """(family, pins). T5 has regions that take half a minute to emit where rows are cut, too."""
    long = {("t5", "tp+sp"), ("t5", "zero3 x tp+sp")}
    found = []
    for family in ("llama", "gpt2", "bert", "t5", "vit", "mixtral"):
        for pins in CASES:
            slow = pytest.mark.slow(30 if (family, pins) in long else 4)
            found.append(pytest.param(family, pins, marks=() if family == "llama" else slow))
    return found


def errors(family: str, program: EmittedProgram) -> float:
    model, batch = tiny_model(family, layers=LAYERS)
    with float64_everywhere():
        found = errors_of_a_step(model, batch, deep(family), program)
    return max(max(of_rank.values()) for of_rank in found)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("family", "pins"), cases())
def test_loss_and_every_gradient_equal_one_process(family: str, pins: str) -> None:
    program = program_of(family, pins)
    assert any(boundary.received for boundary in chunked_boundaries(program))
    schedules = [r.schedule for r in program.regions if r.schedule is not None]
    crosses = any(s.forward_epilogue or s.backward_epilogue for s in schedules)
    # Chunks of T5's narrow products are too short to leave any of them to the next region.
    assert crosses or (family, pins) == ("t5", "tp"), "an epilogue crosses a boundary"
    assert errors(family, program) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("parts", [4])
def test_four_parts_do_so_too(parts: int) -> None:
    assert errors("llama", program_of("llama", "tp+sp", parts)) < EXACT


Change = Callable[[RegionSchedule], RegionSchedule]


def changed(change: Change, pins: str = "tp+sp") -> EmittedProgram:
    """A program whose regions in line have another schedule."""
    program = program_of("llama", pins)
    regions = []
    for region in program.regions:
        if region.schedule is not None and region.schedule.chained:
            region = replace(region, schedule=change(region.schedule))
        regions.append(region)
    return replace(program, regions=tuple(regions))


def without_calls(actions: tuple[RegionAction, ...]) -> tuple[RegionAction, ...]:
    return tuple(action for action in actions if action.kind is not ActionKind.EPILOGUE)


def unbidden(schedule: RegionSchedule) -> RegionSchedule:
    """Tails run when a part is asked for, or at the end."""
    forward, backward = without_calls(schedule.forward), without_calls(schedule.backward)
    return replace(schedule, forward=forward, backward=backward)


def at_once(schedule: RegionSchedule) -> RegionSchedule:
    return replace(unbidden(schedule), forward_epilogue=0, backward_epilogue=0)


def longer(schedule: RegionSchedule) -> RegionSchedule:
    """More is left to the next region than it has actions for."""
    return replace(schedule, forward_epilogue=len(schedule.forward) // 3)


@pytest.mark.parametrize("pins", CASES)
@pytest.mark.parametrize("change", [unbidden, at_once, longer])
def test_a_part_that_is_asked_for_comes(change: Change, pins: str) -> None:
    assert errors("llama", changed(change, pins)) < EXACT


def lossy(schedule: RegionSchedule) -> RegionSchedule:
    """A tail that begins behind the last gradients of weights but one, and lacks the last."""
    actions = schedule.backward
    k = max(k for k, action in enumerate(actions) if action.kind == ActionKind.WEIGHTS)
    tail = len(actions) - k - 1
    return replace(schedule, backward=actions[:k] + actions[k + 1 :], backward_epilogue=tail)


def whole(schedule: RegionSchedule) -> RegionSchedule:
    """The same tail, which lacks nothing."""
    cut = lossy(schedule)
    return replace(schedule, backward_epilogue=cut.backward_epilogue + 1)


def test_compare_step_would_see_a_tail_that_is_cut() -> None:
    assert errors("llama", changed(lossy, "zero3 x tp+sp")) > 1e-3
    assert errors("llama", changed(whole, "zero3 x tp+sp")) < EXACT


def test_gradients_that_leave_with_a_region_are_not_made_in_its_tail() -> None:
    """Without data parallel ranks no gradient is reduced: all leave with the region itself."""
    with pytest.raises(AssertionError, match="computed too late"):
        errors("llama", changed(whole, "tp+sp"))


def test_a_part_that_is_never_made_is_no_number() -> None:
    """Without the action that ends the first part nobody waits for ever, or takes another one."""

    def lacking(schedule: RegionSchedule) -> RegionSchedule:
        makers = schedule.graph.makers
        (join,) = schedule.joins.values()
        first = makers[schedule.graph.segments[join].inputs[1]]
        actions = tuple(m for m in schedule.forward if m != RegionAction(ActionKind.FORWARD, first))
        return replace(schedule, forward=actions)

    with pytest.raises(AssertionError, match="chunk 0 is not computed"):
        errors("llama", changed(lacking))


@pytest.mark.parametrize("pins", CASES)
def test_collectives_run_in_the_simulated_order(pins: str) -> None:
    """Those of layers; what is reduced at the end of the step is simulated as one."""
    plan = plan_of("llama", pins)
    model, batch = tiny_model("llama", layers=LAYERS)

    def body(rank: Rank) -> list[tuple[str, tuple[str, ...]]]:
        with collectives_of(rank.mesh) as calls:
            rank.loss(batch).backward()
        return [(call.kind.removesuffix("_in_place"), tuple(call.axes)) for call in calls]

    with float64_everywhere():
        found = on_ranks(model, deep("llama"), program_of("llama", pins), body)
    assert plan.events is not None
    transfers = [t.collective for t in simulate(plan.events).transfers]
    expected = [(c.kind, c.axes) for c in transfers]
    if pins != "tp":
        found = [[call for call in order if call[0] != "all_reduce"] for order in found]
        expected = [call for call in expected if call[0] != "all_reduce"]
    assert len(expected) > 8 * LAYERS and all(order == expected for order in found)


def test_memory_is_about_that_of_regions_for_themselves() -> None:
    """Within a border two regions have values that they pass on; nothing is kept for longer."""
    model, batch = tiny_model("llama", layers=LAYERS)
    counted = [
        EmittedStep(model, deep("llama"), program, batch).counted_peak_bytes()
        for program in (changed(at_once, "zero3 x tp+sp"), program_of("llama", "zero3 x tp+sp"))
    ]
    assert counted[1] <= 1.1 * counted[0]


@pytest.mark.parametrize("runs_backward", [True, False])
def test_no_step_is_left_behind(runs_backward: bool) -> None:
    model, batch = tiny_model("llama", layers=LAYERS)
    step = EmittedStep(model, deep("llama"), program_of("llama", "zero3 x tp+sp"), batch)
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


def test_frozen_layers_end_the_backward_where_training_ends() -> None:
    """Below the last layer nothing has a gradient: what comes from there brings none."""
    model, batch = tiny_model("llama", layers=LAYERS)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(f"layers.{LAYERS - 1}." in name or "lm_head" in name)
    with float64_everywhere():
        captured = capture(model, batch)
    options = CompileOptions(pins={"tp": 2, "sp": 1, "micro_chunks": 2}, mode="scheduled")
    plan = plan_captured(captured, "llama", resolve_cluster("dgx-h100", 2), options)
    program = emit(captured.graph, plan)
    assert any(boundary.received for boundary in chunked_boundaries(program))

    def body(rank: Rank) -> list[str]:
        for p in captured.graph.parameters:
            rank.parameters[p.name].requires_grad_(p.requires_grad)
        rank.loss(batch).backward()
        return [name for name, p in rank.parameters.items() if p.grad is not None]

    with float64_everywhere():
        trained = [n for n, p in model.named_parameters() if p.requires_grad]
        assert all(set(found) == set(trained) for found in on_ranks(model, captured, program, body))


def test_what_runs_again_arrives_whole() -> None:
    program = emitted("llama", "zero3 x tp+sp, again", parts=2)
    assert not any(boundary.received or boundary.sent for boundary in chunked_boundaries(program))


def test_what_others_read_stays_whole() -> None:
    """The first value that a layer hands on, were it an output of the model as well."""
    program = program_of("llama", "tp+sp")
    before = chunked_boundaries(program)
    k = next(k for k, boundary in enumerate(before) if boundary.sent)
    source: Any = next(
        s for s in program.folded.instances[k + 1].sources if getattr(s, "instance", -1) == k
    )
    output = replace(program.folded.outputs[0], source=source)
    outputs = (*program.folded.outputs, output)
    folded = replace(program.folded, outputs=outputs)
    after = chunked_boundaries(replace(program, folded=folded))
    assert not after[k].sent and not after[k + 1].received
    assert after[k + 2 :] == before[k + 2 :]


def test_regions_in_other_parts_meet_whole() -> None:
    """Samples and rows are other parts of the same value."""
    plan = planned("llama", "tp+sp", parts=2)
    program = emit(captured_family("llama").graph, plan)
    assert [region.chunking.dim for region in plan.regions] == ["samples", "samples", "sequence"]
    assert (
        chunked_boundaries(program)[-1].received == ()
        and chunked_boundaries(program)[-2].sent == ()
    )
