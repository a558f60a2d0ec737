"""Stages whose regions run in segments: the numbers of one process under every schedule that does
not split the backward itself."""

from dataclasses import replace
from typing import Any

import pytest
from support.processes.pool import Pools
from support.programs.pipeline import captured_model, planned, recut

from meshfold.codegen.emit import pipeline as pipeline_program
from meshfold.codegen.emit.pipeline import EmittedPipeline, emit_plan
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.codegen.schedule.list_scheduling import scheduled
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.cost_models.pipeline.schedules import Schedule, ScheduleKind
from meshfold.plan_file.io import plan_to_json

pytestmark = pytest.mark.multiprocess

EXACT = 1e-12
MICROBATCHES = 4
SCHEDULES = (
    Schedule(ScheduleKind.ONE_F_ONE_B, 2, MICROBATCHES),
    Schedule(ScheduleKind.GPIPE, 2, MICROBATCHES),
    Schedule(ScheduleKind.INTERLEAVED, 2, MICROBATCHES, num_virtual_stages=2),
)
CASES = [
    ("llama", {"pp": 2, "tp": 2, "sp": 1}, 1),
    pytest.param("gpt2", {"pp": 2, "tp": 2, "sp": 0}, 3, marks=pytest.mark.slow),
    pytest.param("llama", {"pp": 2, "tp": 2, "recompute": "full"}, 3, marks=pytest.mark.slow),
    pytest.param("llama", {"pp": 2, "dp": 2, "zero": 1}, 3, marks=pytest.mark.slow),
]
"""(family, pins, how many of the schedules)."""


@pytest.mark.parametrize(("family", "pins", "count"), CASES)
def test_scheduled_stages_compute_what_one_process_does(
    pools: Pools, family: str, pins: dict[str, Any], count: int
) -> None:
    pins = {"microbatches": MICROBATCHES, "recompute": "none", **pins}
    base = replace(planned(family, 6, 4, tuple(pins.items())), mode="scheduled")
    plans = [recut(base, schedule) for schedule in SCHEDULES[:count]]
    captured = captured_model(family, 6)
    program = emit_plan(captured.graph, plans[0])
    assert isinstance(program, EmittedPipeline)
    in_segments = [any(r.schedule for r in stage.regions) for stage in program.stages]
    # Layers without tp have nothing to order: the loss is summed over dp once, behind its last use.
    assert all(in_segments) if "tp" in pins else not any(in_segments)
    arguments = (family, 6, captured, [*map(plan_to_json, plans)])
    for outcomes in pools.run(
        4, "support.programs.pipeline:run_pipelines", *arguments, timeout_s=600.0
    ):
        for outcome in outcomes:
            assert max(outcome.loss_error, outcome.gradient_error) < EXACT
            assert outcome.parameter_error < 1e-11


def test_gradients_of_weights_wait_as_far_as_a_device_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pins: dict[str, Any] = {"pp": 2, "tp": 2, "sp": 1, "microbatches": MICROBATCHES}
    pins |= {"recompute": "none", "schedule": "1f1b"}
    plan = replace(planned("llama", 6, 4, tuple(pins.items())), mode="scheduled")
    peaks = [stage.costs.peak_bytes for stage in plan.stages if stage.costs is not None]
    bounds: list[int] = []

    def noted(program: EmittedProgram, costs: CostModel, bound_bytes: int) -> EmittedProgram:
        bounds.append(bound_bytes)
        return scheduled(program, costs, bound_bytes)

    monkeypatch.setattr(pipeline_program, "scheduled", noted)
    emit_plan(captured_model("llama", 6).graph, plan)
    assert bounds == [plan.memory.capacity - peak for peak in peaks]
    bounds.clear()
    full = replace(plan, memory=replace(plan.memory, capacity=peaks[1]))
    emit_plan(captured_model("llama", 6).graph, full)
    assert peaks[0] > peaks[1] and bounds == [0, 0]
