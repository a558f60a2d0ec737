"""The simulated step of a plan with stages or microbatches."""

from functools import cache

import pytest
from support.models.hugging_face import BATCH, tiny_model

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.planner.find import find_plan_for
from meshfold.plan_file.io import plan_from_json, plan_to_json

PROBER = OpProber()


@cache
def llama() -> FoldedGraph:
    return capture(*tiny_model("llama", layers=4)).graph


def planned(num_devices: int = 2, **pins: int | str) -> Plan:
    return find_plan_for(
        llama(),
        resolve_cluster("local-cpu", num_devices),
        CompileOptions(pins=pins, allow_planned=True),
        model_name="llama",
        batch_size=BATCH,
        probe=PROBER,
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_without_collectives_it_is_the_sum_of_the_search(schedule: str) -> None:
    plan = planned(pp=2, microbatches=4, schedule=schedule)
    assert plan.simulated is not None
    assert plan.step_s == plan.simulated.step_s == pytest.approx(plan.time.step_s, rel=1e-9)
    assert plan.simulated.bubble_s == pytest.approx(plan.time.bubble_s, rel=1e-6)
    assert plan.simulated.overlap == () and plan.simulated.contention_s == 0
    assert plan.simulated.peak_bytes == plan.memory.peak
    assert plan_from_json(plan_to_json(plan)) == plan


def test_reductions_of_the_last_microbatch_overlap_its_backward() -> None:
    plan = planned(2, dp=2, microbatches=2, zero=0)
    step = plan.simulated
    assert step is not None and step.bubble_s == 0
    (row,) = [row for row in step.overlap if row.kind == "all_reduce" and row.hidden_s]
    assert row.axes == ("dp",)
    assert (
        step.step_s
        < plan.time.forward_s
        + plan.time.backward_s
        + sum(r.hidden_s + r.exposed_s for r in step.overlap)
        + plan.time.optimizer_s
    )


def test_what_only_can_be_planned_is_simulated_but_for_offload() -> None:
    assert planned(2, dp=2, microbatches=2, recompute="selective").simulated is not None
