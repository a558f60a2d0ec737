"""Which interleaved schedules are searched, and what is said of the others."""

from types import SimpleNamespace

import numpy as np
import pytest
from support.models.hugging_face import BATCH, tiny_model

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.pipeline.schedules import Schedule, ScheduleKind
from meshfold.ir.options import CompileOptions
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.pipeline import interleaved
from meshfold.passes.pipeline.interleaved import estimated_step_s, search_interleaved
from meshfold.passes.planner.find import find_plan_for
from meshfold.passes.stages.problem import LayerCosts, LayerRun, StageProblem
from meshfold.report.search import proof_text


def chain(num_layers: int = 8, num_microbatches: int = 4, memory_bytes: int = 1000):
    layer = LayerCosts.build(
        "layer", ("s",), forward_s=1.0, backward_s=2.0, state_bytes=1, activation_bytes=1
    )
    problem = StageProblem.build(
        (LayerRun(layer, num_layers),),
        num_stages=2,
        num_microbatches=num_microbatches,
        memory_bytes=memory_bytes,
    )
    return SimpleNamespace(chain=problem, launch_s=0.5)


def schedule(virtual_stages: int, num_microbatches: int = 4) -> Schedule:
    kind = ScheduleKind.INTERLEAVED
    return Schedule(kind, 2, num_microbatches, num_virtual_stages=virtual_stages)


def test_the_estimate_of_even_stages_is_their_step():
    problem = chain().chain
    # 4 layers a device, 4 microbatches, and half a stage of 4 layers to fill and drain.
    assert estimated_step_s(problem, schedule(2)) == pytest.approx(4 * 12 + 6)
    assert estimated_step_s(problem, schedule(4)) == pytest.approx(4 * 12 + 3)
    # 8 layers in 6 parts: one of 2 layers is on each device, as if there were 12.
    assert estimated_step_s(problem, schedule(3)) == pytest.approx(1.5 * (4 * 12 + 4))
    assert estimated_step_s(chain(memory_bytes=4).chain, schedule(2)) == np.inf


def test_the_fastest_is_found_and_the_bound_covers_what_was_tried():
    found = search_interleaved({7: chain()}, {7: [schedule(v) for v in (2, 3, 4)]}, 1000.0)
    number, plan = found.best
    assert number == 7 and plan.schedule == schedule(4)
    assert plan.step_s == pytest.approx(4 * 12 + 3)
    assert found.bound_s <= plan.step_s + 0.5
    assert found.tried == (7, 7, 7)


def test_those_that_are_estimated_to_be_slower_are_left_out():
    schedules = {7: [schedule(v) for v in (2, 3, 4)]}
    found = search_interleaved({7: chain()}, schedules, 54.0)  # 54.5 s with two, more with three
    assert found.best is not None and found.tried == (7,)
    none = search_interleaved({7: chain()}, schedules, 51.0)
    assert none.best is None and none.tried == () and none.bound_s == np.inf


def test_what_is_too_long_to_simulate_is_left_out(monkeypatch):
    monkeypatch.setattr(interleaved, "MOST_PASSES", 16)
    found = search_interleaved({7: chain()}, {7: [schedule(2), schedule(4)]}, 1000.0)
    assert found.best[1].schedule == schedule(2) and found.tried == (7,)


def test_what_is_left_out_is_no_leaf_of_the_tree():
    found = find_plan_for(
        capture(*tiny_model("llama", layers=4)).graph,
        resolve_cluster("dgx-a100-80", 4),
        CompileOptions(pins={"pp": 2, "microbatches": 2}),
        model_name="llama",
        batch_size=BATCH,
        probe=OpProber(),
    )
    search = found.search
    assert search.num_leaves >= sum(search.pruned.values())
    assert interleaved.INTERLEAVED not in search.pruned
    assert all(count > 0 for count in search.left_out.values())
    text = proof_text(found)
    assert all(f"{name} ({count:,})" in text for name, count in search.left_out.items())
