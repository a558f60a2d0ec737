"""The simulated step of a plan with stages or microbatches."""

from functools import cache

import pytest
from support.models.hugging_face import BATCH, tiny_model
from support.processes.offload import cluster_with_hosts

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.ir.strategy import Offload, UniformStrategy
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.one_pass import shortlist
from meshfold.passes.one_pass.tree import SearchSpec
from meshfold.passes.pipeline import simulated
from meshfold.passes.pipeline.layers import StrategyCosts
from meshfold.passes.pipeline.problem import PipelineProblems
from meshfold.passes.pipeline.search import PricedPipeline, search_pipelines
from meshfold.passes.pipeline.simulated import rank_pipelines, simulated_step_s
from meshfold.passes.pipeline.tree import grow_pipelines
from meshfold.passes.planner.find import find_plan_for
from meshfold.plan_file.io import plan_from_json, plan_to_json

PROBER = OpProber()


@cache
def llama() -> FoldedGraph:
    return capture(*tiny_model("llama", layers=4)).graph


def planned(num_devices: int = 2, **pins: int | str) -> Plan:
    return plan_on(resolve_cluster("local-cpu", num_devices), **pins)


def on_hosts(**pins: int | str) -> Plan:
    return plan_on(cluster_with_hosts(2), **pins)


def plan_on(cluster: ClusterSpec, **pins: int | str) -> Plan:
    return find_plan_for(
        llama(),
        cluster,
        CompileOptions(pins=pins),
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


@pytest.mark.parametrize("offload", ["optimizer", "disk"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_with_layers_on_the_host_it_is_the_sum_as_well(offload: str, schedule: str) -> None:
    plan = on_hosts(pp=2, microbatches=4, schedule=schedule, offload=offload)
    assert {region.strategy.offload for region in plan.regions} == {offload}
    assert plan.simulated is not None
    assert plan.simulated.step_s == pytest.approx(plan.time.step_s, rel=1e-9)


def test_what_comes_layer_by_layer_is_waited_for_by_the_first_of_each_stage() -> None:
    """The sum charges each layer its share of that."""
    plan = on_hosts(pp=2, microbatches=4, schedule="1f1b", offload="parameters")
    assert plan.simulated is not None and plan.simulated.exposed_s > 0
    assert plan.simulated.step_s == pytest.approx(plan.time.step_s, rel=0.01)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_what_zero_moves_with_every_microbatch_is_in_the_sum(zero: int, offload: str) -> None:
    """Its ends, which nothing hides, and what kernels lose beside it."""
    plan = on_hosts(dp=2, microbatches=2, zero=zero, offload=offload)
    assert plan.simulated is not None and plan.simulated.contention_s > 0
    assert plan.simulated.step_s == pytest.approx(plan.time.step_s, rel=0.05)


def pipelines() -> tuple[PipelineProblems, list[PricedPipeline]]:
    """Three of one model on two devices."""
    cluster = resolve_cluster("local-cpu", 2)
    problems = PipelineProblems(llama(), cluster, CompileOptions(), BATCH, PROBER)
    found = []
    for pins in (
        {"pp": 2, "microbatches": 2},
        {"pp": 2, "microbatches": 4},
        {"dp": 2, "microbatches": 2},
    ):
        spec = SearchSpec(2, 2, BATCH, pins=pins)
        best = search_pipelines(problems, grow_pipelines(spec, len(llama().instances))).best
        assert best is not None
        found.append(best)
    return problems, found


def test_pipelines_are_ranked_by_their_simulated_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    problems, found = pipelines()
    by_sum = sorted(found, key=lambda x: x.step_s)
    seconds = {id(x): 10.0 - k for k, x in enumerate(by_sum)}
    monkeypatch.setattr(simulated, "simulated_step_s", lambda _, x: seconds[id(x)])
    monkeypatch.setattr(shortlist, "CONTENTION_RATIO", by_sum[1].step_s / by_sum[0].step_s)
    ranked = rank_pipelines(problems, found)
    # The third is too far behind by its sum to be simulated.
    assert [x for x, _ in ranked] == [by_sum[1], by_sum[0], by_sum[2]]
    assert [s for _, s in ranked] == [9.0, 10.0, by_sum[2].step_s]
    monkeypatch.setattr(simulated, "simulated_step_s", lambda _, x: 1.0)
    assert [x for x, _ in rank_pipelines(problems, found[::-1])] == by_sum


def test_the_simulated_step_of_a_priced_pipeline_is_that_of_its_plan() -> None:
    problems, found = pipelines()
    steps = [simulated_step_s(problems, x) for x in found]
    # Without collectives, each is its sum.
    assert steps[:2] == pytest.approx([x.step_s for x in found[:2]], rel=1e-9)
    assert steps[0] == planned(2, pp=2, microbatches=2).step_s


def test_only_microbatches_behind_the_first_add_to_gradients() -> None:
    """One of two adds, three of four do; what adds is in the backward, and in W."""
    cluster = cluster_with_hosts(1)
    problems = PipelineProblems(llama(), cluster, CompileOptions(), BATCH, PROBER)

    def costs_of(microbatches: int, offload: Offload = "none") -> StrategyCosts:
        strategy = UniformStrategy(microbatches=microbatches, offload=offload)
        return problems.layer_costs([strategy])[1][0]

    one, two, four = map(costs_of, (1, 2, 4))
    assert one.added_s == 0 < two.added_s
    assert four.added_s == pytest.approx(1.5 * two.added_s)
    layer = problems.tables(two.strategy, ["none"]).layers[1]
    assert two.weight_s == layer.weight_s + two.added_s
    price = layer.region.price("none")
    assert two.backward_s == pytest.approx(price.backward_s + price.graph_backward_s + two.added_s)
    # The host adds up what leaves; the last of it is still to be added when the step ends.
    moved, alone = costs_of(2, "optimizer"), costs_of(1, "optimizer")
    assert moved.added_s == 0
    left_bytes = two.gradient_bytes - moved.gradient_bytes
    assert left_bytes > 0
    assert moved.host.memory_bytes == alone.host.memory_bytes + left_bytes
