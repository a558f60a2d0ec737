"""Operators in slices, in programs: numbers of one process, memory as it is counted, and tensors of
the user's model in states."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.hugging_face import tiny_model
from support.processes.pool import Pools
from support.programs.memory import EmittedStep
from support.programs.pinned import cases, program_and_error
from support.programs.pipeline import captured_model

from meshfold.api import plan_captured
from meshfold.capture.pipeline import capture
from meshfold.codegen.emit.pipeline import emit_plan
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.ir.options import CompileOptions, Mode
from meshfold.plan_file.io import plan_to_json
from meshfold.validation.float64_mode import float64_everywhere

PINS: dict[str, dict[str, Any]] = {
    "one": {},
    "zero2": {"dp": 2, "zero": 2},
    "zero3": {"dp": 4, "zero": 3},
    "tp": {"tp": 2},
    "zero3 x tp, again": {"dp": 2, "tp": 2, "zero": 3, "recompute": "full"},
}


QUICK: list[tuple[str, str, Mode]] = [
    ("gpt2", "zero3", "eager"),
    ("llama", "zero3 x tp, again", "scheduled"),
]


@pytest.mark.parametrize(("family", "pins", "mode"), cases(QUICK, PINS))
def test_loss_and_every_gradient_equal_one_process(family: str, pins: str, mode: Mode) -> None:
    """5 slices: along columns of results and of inputs, of tables, too."""
    program, error = program_and_error(family, {**PINS[pins], "slices": 5}, mode)
    assert any(s.slice for i in program.folded.instances for s in i.sources)
    assert error < 1e-12


def test_dropout_draws_what_it_draws_without_slices() -> None:
    model, batch = tiny_model("gpt2")
    with float64_everywhere():
        captured = capture(model.train(), batch)
    losses = []
    for slices in (1, 4):
        pins = {"dp": 2, "zero": 3, "microbatches": 1, "slices": slices}
        found = plan_captured(
            captured, "gpt2", resolve_cluster("local-cpu", 2), CompileOptions(pins=pins)
        )
        program = emit_plan(captured.graph, found)
        assert isinstance(program, EmittedProgram)
        with float64_everywhere():
            losses.append(EmittedStep(model, captured, program, batch).forward().item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-14)


def test_memory_is_what_is_counted() -> None:
    """Without buckets, which hold all of a tiny model."""
    model, batch = tiny_model("llama", dtype=torch.float32)
    captured = capture(model, batch)
    pins: dict[str, Any] = {"dp": 2, "zero": 3, "recompute": "none", "microbatches": 1}
    pins |= {"reduce_bucket_bytes": 0, "allgather_bucket_bytes": 0}
    peaks = []
    for slices in (1, 4):
        pins["slices"] = slices
        options = CompileOptions(pins=pins, optimizer="sgd")
        found = plan_captured(captured, "llama", resolve_cluster("local-cpu", 2), options)
        program = emit_plan(captured.graph, found)
        assert isinstance(program, EmittedProgram)
        counted = EmittedStep(model, captured, program, batch).counted_peak_bytes()
        predicted = found.memory.peak - found.memory.reserve - found.memory.parameters
        predicted -= sum(t.nbytes for t in batch.values()) // 2
        assert predicted == pytest.approx(counted, rel=0.08)
        peaks.append(counted)
    assert peaks[1] < peaks[0]


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_states_hold_whole_parameters(pools: Pools, family: str, tmp_path: Path) -> None:
    """Saved with slices and without, loaded under both and by the model itself."""
    captured = captured_model(family, 2)
    cluster = resolve_cluster("local-cpu", 2)
    pins: dict[str, Any] = {"dp": 2, "zero": 3, "microbatches": 1}
    plans = [
        plan_to_json(
            plan_captured(captured, family, cluster, CompileOptions(pins={**pins, "slices": n}))
        )
        for n in (5, 1)
    ]
    for k, given in enumerate((plans, plans[::-1])):
        arguments = family, 2, captured, given, str(tmp_path / str(k))
        for wrong in pools.run(2, "support.programs.pipeline:save_and_load", *arguments):
            assert wrong == []


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "num_ranks", "pins"),
    [
        ("gpt2", 2, {"pp": 2}),
        ("llama", 4, {"pp": 2, "dp": 2, "zero": 3}),
        ("gpt2", 2, {"dp": 2, "zero": 3}),
        ("llama", 4, {"pp": 2, "dp": 2, "schedule": "zero_bubble"}),
        ("llama", 2, {"dp": 2, "zero": 3, "microbatches": 1}),
    ],
)
def test_steps_on_processes(
    pools: Pools, family: str, num_ranks: int, pins: dict[str, Any]
) -> None:
    """Three steps of AdamW, in stages, microbatches and one pass."""
    captured = captured_model(family, 2)
    options = CompileOptions(pins={"microbatches": 2, **pins, "slices": 4})
    found = plan_captured(captured, family, resolve_cluster("local-cpu", num_ranks), options)
    arguments = family, 2, captured, [plan_to_json(found)]
    ran = pools.run(
        num_ranks, "support.programs.pipeline:run_pipelines", *arguments, timeout_s=600.0
    )
    for (outcome,) in ran:
        assert max(outcome.loss_error, outcome.gradient_error, outcome.parameter_error) < 1e-12
