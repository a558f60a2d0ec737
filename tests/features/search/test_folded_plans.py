"""Planning the folded program gives what planning it layer by layer gives."""

from functools import cache

import pytest
from support.models.hugging_face import BATCH, tiny_model

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import InfeasibleError
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.graph.variants import split_regions
from meshfold.passes.planner.find import find_plan_for

PROBER = OpProber()
PINS = {"dp": 2, "tp": 2, "sp": 1}


@cache
def graph_of(layers: int) -> FoldedGraph:
    model, batch = tiny_model("llama", layers=layers)
    return capture(model, batch).graph


def plan(graph: FoldedGraph, memory_bytes: int | None) -> Plan:
    return find_plan_for(
        graph,
        resolve_cluster("local-cpu", 4),
        CompileOptions(pins=PINS, memory_bytes=memory_bytes),
        model_name="llama",
        batch_size=BATCH,
        probe=PROBER,
    )


@pytest.mark.parametrize("layers", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_every_layer_a_region_of_its_own_plans_alike(layers: int) -> None:
    folded = graph_of(layers)
    unfolded = split_regions(folded, range(len(folded.instances)))
    assert len(unfolded.regions) == len(folded.instances) > len(folded.regions)
    one, other = plan(folded, None), plan(unfolded, None)
    assert one.time.step_s == pytest.approx(other.time.step_s, rel=1e-9)
    assert one.memory.peak == other.memory.peak
    with pytest.raises(InfeasibleError) as caught:
        plan(folded, 10_000)
    budget = (caught.value.required_bytes + one.memory.peak) // 2
    one, other = plan(folded, budget), plan(unfolded, budget)
    # Memory is bisected: neither may be worse than the other by more than it says itself.
    assert one.time.step_s <= other.time.step_s * (1 + one.gap)
    assert other.time.step_s <= one.time.step_s * (1 + other.gap)
