"""Regions that run in parts: the numbers of one process, what is chosen, and what is refused."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.models.hugging_face import tiny_model
from support.processes.pool import Pools
from support.programs.local_programs import errors_of_a_step, stack_model
from support.programs.schedules import PINS, captured_family, emitted, plan_text, planned

from meshfold.api import plan_captured
from meshfold.capture.pipeline import Captured, capture
from meshfold.codegen.emit.pass_pipeline import PassRun, emit
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import OptionError, PlanMismatchError
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.ir.strategy import Chunking
from meshfold.models.from_argument import build_model
from meshfold.ops.conversions import STARTS
from meshfold.passes.graph.variants import planned_graph
from meshfold.passes.split.chunk_graph import ChunkingError
from meshfold.passes.split.micro_chunks import ChunkingProblem
from meshfold.plan_file.io import plan_from_json, plan_to_json
from meshfold.refine.micro_chunks import with_micro_chunks
from meshfold.report.plan_diff import compare_plans
from meshfold.validation.float64_mode import float64_everywhere

pytestmark = pytest.mark.xdist_group("schedules")

EXACT = 1e-12
CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "configs"
ROWS = 4
"""Samples of the tiny models."""


def cases() -> list[object]:
    """(family, pins); T5 of one layer per stack is one region with its loss."""
    found = []
    for pins in PINS:
        for family in ("gpt2", "llama", "bert", "vit", "mixtral"):
            is_quick = family == "llama" and pins in ("tp+sp", "zero3 x tp+sp, again")
            if "ep" not in pins or family == "mixtral":
                marks = () if is_quick else pytest.mark.slow
                found.append(pytest.param(family, pins, marks=marks))
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "pins"), cases())
def test_loss_and_every_gradient_equal_one_process(family: str, pins: str) -> None:
    model, batch = tiny_model(family)
    program = emitted(family, pins, parts=2)
    assert any(len(r.ops.ops) > len(p.graph.ops) for r, p in regions_of(program))
    with float64_everywhere():
        found = errors_of_a_step(model, batch, captured_family(family), program)
    assert max(max(errors.values()) for errors in found) < EXACT


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "pins"), cases())
def test_the_same_for_rows_of_the_sequence(family: str, pins: str) -> None:
    """vit has 10 rows, which do not divide over two ranks and two parts."""
    plan = planned(family, pins)
    if family == "vit" and ("sp" in pins or "cp" in pins):
        with pytest.raises(
            PlanMismatchError, match="10 do not divide into 2 micro-chunks on 2 ranks"
        ):
            emit(captured_family(family).graph, in_rows(plan))
        return
    model, batch = tiny_model(family)
    program = emit(captured_family(family).graph, in_rows(plan))
    with float64_everywhere():
        found = errors_of_a_step(model, batch, captured_family(family), program)
    assert max(max(errors.values()) for errors in found) < EXACT


def in_rows(plan: Plan, count: int = 2) -> Plan:
    """All regions but the first, which has ids and no activations."""
    first, *others = plan.regions
    parts = Chunking(count, "sequence")
    return replace(plan, regions=(first, *(replace(r, chunking=parts) for r in others)))


@pytest.mark.multiprocess
@pytest.mark.parametrize("pins", ["tp+sp", pytest.param("zero3 x tp+sp", marks=pytest.mark.slow)])
def test_the_same_on_processes(pools: Pools, pins: str) -> None:
    arguments = "llama", captured_family("llama"), plan_text("llama", pins, parts=2)
    found = pools.run(PINS[pins][0], "support.programs.emit:compare_step", *arguments)
    for loss_error, gradient_error, name, uneven in found:
        assert loss_error < EXACT and gradient_error < EXACT, name
        assert not uneven


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_one_sample_at_a_time(family: str) -> None:
    model, batch = tiny_model(family)
    program = emitted(family, "tp+sp", parts=ROWS)
    with float64_everywhere():
        found = errors_of_a_step(model, batch, captured_family(family), program)
    assert max(max(errors.values()) for errors in found) < EXACT


def regions_of(program: EmittedProgram) -> list[tuple[Any, Any]]:
    return [(r, program.folded.regions[r.region]) for r in program.regions]


def test_every_collective_of_the_layers_is_one_per_part() -> None:
    counts = []
    for parts in (1, 2, 4):
        region = emitted("llama", "tp+sp", parts=parts).regions[1]
        counts.append(sum(node.target in STARTS for node in region.graph.graph.nodes))
    assert counts[0] > 0
    assert counts == [counts[0], 2 * counts[0], 4 * counts[0]]


def test_parts_are_a_pass_of_their_own() -> None:
    ran: list[PassRun] = []
    emit(captured_family("llama").graph, planned("llama", "tp+sp", parts=2), ran.append)
    assert [one.name for one in ran] == [
        "emit",
        "micro_chunks",
        "collective_matmul",
        "schedule",
        "chain",
        "bucket",
    ]
    before, after = (one.program.text() for one in ran[:2])
    assert "unbind" in after and "unbind" not in before


# What is chosen.


@cache
def wide_llama() -> Captured:
    model, batch = tiny_model("llama", layers=3)
    with float64_everywhere():
        return capture(model, {name: x.repeat(4, 1) for name, x in batch.items()})


def on_h100s(pins: dict[str, Any], **more: Any) -> Plan:
    options = CompileOptions(pins=pins, mode="scheduled", **more)
    return plan_captured(wide_llama(), "llama", resolve_cluster("dgx-h100"), options)


@pytest.mark.parametrize("pins", [{"tp": 4, "dp": 2, "sp": 1}, {"dp": 8, "zero": 3}])
def test_what_is_chosen_is_not_slower_and_fits(pins: dict[str, Any]) -> None:
    whole, chosen = on_h100s({**pins, "micro_chunks": 1}), on_h100s(pins)
    assert whole.simulated is not None and chosen.simulated is not None
    assert chosen.simulated.step_s <= whole.simulated.step_s
    assert chosen.simulated.peak_bytes <= chosen.memory.capacity


def test_parts_hide_what_a_layer_waits_for() -> None:
    """Products and collectives of tensor parallel layers take turns otherwise."""
    built = build_model(str(CONFIGS / "llama-3-8b.json"), batch=8, sequence=2048)
    captured = capture(built.model, built.example_inputs)
    # Without rings, which hide as much here.
    cluster, pins = resolve_cluster("dgx-h100"), {"tp": 8, "sp": 1, "collective_matmul": 0}
    options = CompileOptions(pins=pins, mode="scheduled")
    chosen = plan_captured(captured, "llama", cluster, options)
    whole = with_micro_chunks(chosen_in_one(chosen), captured.graph, 1)
    assert max(region.chunking.count for region in chosen.regions) > 1
    assert chosen.simulated is not None and whole.simulated is not None
    assert chosen.simulated.step_s < 0.95 * whole.simulated.step_s
    assert chosen.simulated.exposed_s < 0.6 * whole.simulated.exposed_s


def chosen_in_one(plan: Plan) -> Plan:
    return replace(
        plan, regions=tuple(replace(region, chunking=Chunking()) for region in plan.regions)
    )


def test_plans_keep_parts() -> None:
    plan = planned("llama", "tp+sp", parts=2)
    rows, samples = Chunking(2, "sequence"), Chunking(2, "samples")
    assert [region.chunking for region in plan.regions] == [samples, samples, rows]
    assert plan_from_json(plan_to_json(plan)) == plan
    found = compare_plans(planned("llama", "tp+sp"), plan)
    changes = [(c.first, c.second) for c in found.choices if "micro-chunks" in c.what]
    assert changes[0] == ("not chunked", "2 micro-chunks of its samples")


# What is refused.


def test_a_pin_needs_the_mode() -> None:
    with pytest.raises(
        OptionError, match="pin micro_chunks=2: regions run in micro-chunks in mode scheduled"
    ):
        CompileOptions(pins={"micro_chunks": 2}, mode="eager")


def test_a_pin_that_no_region_can_keep_says_why() -> None:
    with pytest.raises(
        OptionError, match=r"micro_chunks=3: no region can run so \(region B: 4 do not"
    ):
        planned("llama", "tp+sp", parts=3)


def test_a_pin_beside_stages_is_refused() -> None:
    options = CompileOptions(pins={"pp": 2, "micro_chunks": 2}, mode="scheduled")
    with pytest.raises(
        OptionError, match="pin micro_chunks=2: stages of a pipeline do not run in micro-chunks"
    ):
        plan_captured(captured_family("llama"), "llama", resolve_cluster("local-cpu", 2), options)


def test_a_plan_whose_parts_do_not_divide_is_refused() -> None:
    plan = planned("llama", "tp+sp", parts=2)
    wrong = replace(plan, regions=tuple(replace(r, chunking=Chunking(3)) for r in plan.regions))
    with pytest.raises(
        PlanMismatchError, match="3 micro-chunks of its samples, but 4 do not divide"
    ):
        emit(captured_family("llama").graph, wrong)


def why_not(captured: Captured, plan: Plan) -> dict[int, str]:
    """Per region why it cannot run in two parts."""
    split = planned_graph(captured.graph, plan)
    problem = ChunkingProblem(split, plan)
    found = {}
    for k, region in enumerate(plan.regions):
        try:
            problem.chunked(k, region.typing, Chunking(2))
        except ChunkingError as error:
            found[k] = str(error)
    return found


def test_what_no_part_can_make_alone_is_named() -> None:
    plan = planned("llama", "tp+sp")
    assert why_not(captured_family("llama"), plan) == {
        2: "aten.cross_entropy_loss.default adds up over what is split"
    }
    model, batch = stack_model(3, dropout=0.5)
    captured = capture(model.train(), batch)
    options = CompileOptions(pins={"tp": 2}, mode="scheduled")
    plan = plan_captured(captured, "stack", resolve_cluster("local-cpu", 2), options)
    assert "draws random numbers" in "".join(why_not(captured, plan).values())
