"""Merged reductions: what is simulated is what runs, and merging never costs."""

import json
from dataclasses import replace

import pytest
from support.models.hugging_face import families, tiny_model
from support.programs.events import DP, STRATEGIES, ZERO3, Eager, eager, label, predicted, recorded
from support.programs.local_programs import capture
from support.programs.memory import EmittedStep
from support.programs.schedules import captured_family
from support.programs.schedules import planned as planned_in

import meshfold
from meshfold.codegen.emit.pipeline import emit_plan
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.cost_models.simulation.step import simulate
from meshfold.errors import OptionError
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.events.bucketing import (
    LEAST_GAIN,
    BucketSizes,
    _sizes,
    bucketed_events,
    gathers_of,
    reductions_of,
    with_bucket_sizes,
    with_buckets,
)
from meshfold.passes.planner.check import price_plan
from meshfold.plan_file.io import plan_from_json, plan_to_json
from meshfold.report.plan_diff import compare_plans
from meshfold.validation.collective_order import collectives_of
from meshfold.validation.float64_mode import float64_everywhere

SOME, EVERYTHING = 91_000, 1 << 40


def _merged(program, most_bytes: int):
    return replace(program, reduce_bucket_bytes=most_bytes, allgather_bucket_bytes=most_bytes)


def merged_case(case: Eager, most_bytes: int) -> Eager:
    sizes = BucketSizes(most_bytes, most_bytes)
    events = bucketed_events(case.events, sizes, case.pricers[0].costs)
    return replace(case, events=events, program=_merged(case.program, most_bytes))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_everything", [False, True], ids=["pairs", "everything"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=label)
@pytest.mark.parametrize("family", families("llama", without=("mixtral",)))
def test_what_is_simulated_is_what_runs(family, strategy, is_everything) -> None:
    plain = eager(family, strategy)
    two_layers = 2 * max(r.num_bytes for r in reductions_of(plain.events))
    case = merged_case(plain, EVERYTHING if is_everything else two_layers)
    assert case.program.reduced_together == tuple(m.groups for m in case.events.reduce_buckets)
    assert case.program.gathered_together == tuple(m.groups for m in case.events.allgather_buckets)
    assert case.program.reduced_together
    assert bool(case.program.gathered_together) == any(gathers_of(case.events))
    assert case.program.digest != plain.program.digest
    real = recorded(case)
    assert len(real) < len(recorded(plain))
    assert predicted(case) == real
    # Nothing is lost: as many bytes are reduced.
    sums = [sum(r.num_bytes for r in reductions_of(c.events)) for c in (plain, case)]
    assert sums[0] == sums[1]


@pytest.mark.parametrize("pins", ["zero3 x tp+sp", "zero2 x tp"])
def test_the_same_in_scheduled_mode(pins) -> None:
    plan = with_bucket_sizes(planned_in("llama", pins), BucketSizes(EVERYTHING, EVERYTHING))
    assert plan.events.reduce_buckets and plan.events.allgather_buckets
    captured = captured_family("llama")
    model, batch = tiny_model("llama")
    step = EmittedStep(model, captured, emit_plan(captured.graph, plan), batch)
    with float64_everywhere(), collectives_of(step.runner.mesh) as calls:
        step.train()
    real = [(c.kind, c.axes) for c in calls]
    found = [(t.collective.kind, t.collective.axes) for t in simulate(plan.events).transfers]
    moved = "all_gather", "reduce_scatter"
    assert [c for c in real if c[0] in moved] == [c for c in found if c[0] in moved]


@pytest.mark.parametrize("strategy", [DP, ZERO3], ids=label)
def test_exposed_times_add_up(strategy) -> None:
    case = merged_case(eager("llama", strategy, cluster_name="dgx-h100"), SOME)
    step = simulate(case.events).step
    assert step.exposed_s == pytest.approx(sum(row.exposed_s for row in step.overlap))
    assert step.step_s == pytest.approx(step.compute_s + step.contention_s + step.exposed_s)


def planned(**pins) -> Plan:
    model, batch = tiny_model("llama", layers=4)
    cluster = resolve_cluster("dgx-h100", 4)
    return meshfold.find_plan(model, cluster, batch, options=CompileOptions(pins=pins))


@pytest.mark.parametrize(
    "pins", [{"dp": 4, "zero": 0}, {"dp": 4, "zero": 3}, {"dp": 2, "tp": 2, "sp": 1, "zero": 0}]
)
def test_the_fastest_size_that_fits_is_taken(pins) -> None:
    plain = planned(**pins, reduce_bucket_bytes=0, allgather_bucket_bytes=0)
    found = with_buckets(plain, BucketSizes())
    assert plain.reduce_bucket_bytes == 0 and plain.events.reduce_buckets == ()
    assert found.reduce_bucket_bytes and found.simulated.step_s < plain.simulated.step_s
    assert found.simulated == simulate(found.events).step
    costs = CostModel(plain.cluster, plain.mesh)
    sizes = [0, *_sizes(list(reductions_of(plain.events)))]
    steps = [with_bucket_sizes(plain, BucketSizes(n, 0), costs).simulated for n in sizes]
    fastest_s = min(step.step_s for step in steps)
    assert found.simulated.step_s <= fastest_s + LEAST_GAIN * plain.simulated.step_s
    # What does not fit is not taken.
    tight = replace(plain.memory, reserve=0, capacity=plain.simulated.peak_bytes)
    careful = with_buckets(replace(plain, memory=tight), BucketSizes())
    assert careful.simulated.peak_bytes <= plain.simulated.peak_bytes
    assert careful.simulated.step_s <= plain.simulated.step_s


def test_a_plan_says_what_is_coalesced_and_is_priced_so() -> None:
    found = planned(dp=4, zero=3, reduce_bucket_bytes="1MB", allgather_bucket_bytes="1MB")
    assert found.reduce_bucket_bytes == found.allgather_bucket_bytes == 10**6
    assert found.events.reduce_buckets and found.events.allgather_buckets
    again = plan_from_json(plan_to_json(found))
    assert again == found
    graph = capture(*tiny_model("llama", layers=4)).graph
    assert price_plan(graph, again, OpProber()).events == found.events
    other = planned(dp=4, zero=3, reduce_bucket_bytes=0, allgather_bucket_bytes="1MB")
    (row,) = [d for d in compare_plans(other, found).choices if "buckets" in d.what]
    assert (row.first, row.second) == ("none", "up to 1.00 MB")


def test_a_plan_that_says_nothing_of_buckets_has_none() -> None:
    document = json.loads(plan_to_json(planned(dp=4, zero=0, reduce_bucket_bytes=0)))
    del document["reduce_bucket_bytes"]
    assert plan_from_json(json.dumps(document)).reduce_bucket_bytes == 0


def test_a_pin_that_is_no_size_is_refused() -> None:
    with pytest.raises(
        OptionError, match="pin reduce_bucket_bytes=all: no size; write one, as 25MB, or 0"
    ):
        planned(dp=4, reduce_bucket_bytes="all")
