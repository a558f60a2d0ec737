"""Schedules in the simulator: not slower than eager mode, within memory, gathers ahead of need."""

from dataclasses import replace
from functools import cache

import pytest
from measuring.budgets import Models, TrainingRank
from support.models.hugging_face import tiny_model
from support.processes.offload import cluster_with_hosts

from meshfold.api import plan_captured
from meshfold.capture.pipeline import Captured, capture
from meshfold.codegen.emit.pipeline import emit_plan
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.simulation.step import Simulation, simulate
from meshfold.cost_models.simulation.streams import Transfer
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.plan_file.io import plan_from_json, plan_to_json
from meshfold.refine.program_events import with_program_events
from meshfold.validation.float64_mode import float64_everywhere

pytestmark = pytest.mark.xdist_group("schedules")

CASES = {
    "zero3": {"dp": 8, "zero": 3},
    "tp": {"tp": 4, "dp": 2, "sp": 0, "zero": 0},
    "tp+sp": {"tp": 4, "dp": 2, "sp": 1, "zero": 3},
    "again": {"tp": 4, "dp": 2, "sp": 1, "zero": 3, "recompute": "full"},
}


@cache
def captured_llama(layers: int) -> Captured:
    model, batch = tiny_model("llama", layers=layers)
    with float64_everywhere():
        return capture(model, {name: x.repeat(4, 1) for name, x in batch.items()})


@cache
def eager_plan(name: str, layers: int = 3) -> Plan:
    options = CompileOptions(
        pins={**CASES[name], "reduce_bucket_bytes": 0, "allgather_bucket_bytes": 0},
        mode="eager",
    )
    cluster = resolve_cluster("dgx-h100")
    return plan_captured(captured_llama(layers), "llama", cluster, options)


def scheduled(plan: Plan, layers: int = 3) -> Plan:
    return with_program_events(replace(plan, mode="scheduled"), captured_llama(layers).graph)


@pytest.mark.parametrize("name", CASES)
def test_a_schedule_takes_no_longer_and_no_more_memory(name: str) -> None:
    eager = eager_plan(name)
    plan = scheduled(eager)
    assert eager.simulated is not None and plan.simulated is not None
    # Contention counts compute beside collectives, of which there is more.
    assert plan.simulated.step_s <= 1.005 * eager.simulated.step_s
    assert plan.simulated.peak_bytes <= plan.memory.capacity
    # The same collectives, of the same kinds.
    counts = [
        sorted((row.kind, row.axes, row.count) for row in p.simulated.overlap)
        for p in (eager, plan)
        if p.simulated is not None
    ]
    assert counts[0] == counts[1]
    assert plan_from_json(plan_to_json(plan)).simulated == plan.simulated


def test_more_memory_is_never_slower_and_never_exceeded() -> None:
    plan = eager_plan("tp+sp")
    times = []
    for more in (0, 1 << 10, 1 << 14, 1 << 20):
        memory = replace(plan.memory, capacity=plan.memory.peak + more)
        found = scheduled(replace(plan, memory=memory)).simulated
        assert found is not None and found.peak_bytes <= memory.capacity
        times.append(found.step_s)
    assert times == sorted(times, reverse=True)


def is_ahead(course: Simulation, transfer: Transfer) -> bool:
    """Whether another region computes between the start of a collective and its own region."""
    if transfer.collective.kind == "reduce_scatter":
        return any(s.instance < transfer.instance for s in course.spans)
    later = [s for s in course.spans if s.end_s > transfer.issued_s]
    first = next((k for k, s in enumerate(later) if s.instance == transfer.instance), 0)
    return first > 0


@pytest.mark.parametrize("mode", ["eager", "scheduled"])
def test_gathers_and_reductions_of_twelve_layers_start_a_region_ahead(mode: str) -> None:
    plan = eager_plan("zero3", 12)
    if mode == "scheduled":
        plan = scheduled(plan, 12)
    assert plan.events is not None
    course = simulate(plan.events)
    kinds = ("all_gather", "reduce_scatter")
    moved = [t for t in course.transfers if t.collective.kind in kinds]
    ahead = [t for t in moved if is_ahead(course, t)]
    assert len(moved) > 36 and len(ahead) >= 0.9 * len(moved)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_what_is_put_off_is_there_from_the_next_op_on(family: str) -> None:
    """Products whose gradient of the weight waits are followed by ops of the same segment."""
    models = Models()
    model, batch, captured = models.of(family)
    options = CompileOptions(pins={"tp": 2, "microbatches": 1}, mode="scheduled")
    cluster = cluster_with_hosts(2)
    plan = plan_captured(captured, family, cluster, options, probe=models.probe)
    program = emit_plan(captured.graph, plan)
    counted = TrainingRank(program, 0, model, batch, captured).counted_bytes()
    # Scalars are not all counted.
    assert counted - 16 <= plan.memory.peak - plan.memory.reserve <= 1.03 * counted
