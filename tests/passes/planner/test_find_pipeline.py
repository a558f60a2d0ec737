"""Pipelines in plans of small models: against brute force, pins, placement, memory, refusal."""

import json
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.models.hugging_face import BATCH, HIDDEN, SEQUENCE
from support.search.pipelines import PROBER, graph_of, problems_of, slow_links, tree_for

from meshfold.codegen.emit.pipeline import EmittedPipeline, emit_plan
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.cost_models.pipeline.actions import Pass
from meshfold.cost_models.pipeline.makespan import StageTimes, device_ends_s
from meshfold.cost_models.pipeline.schedules import Schedule, ScheduleKind
from meshfold.errors import InfeasibleError, OptionError, PlanMismatchError
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.ir.strategy import UniformStrategy
from meshfold.passes.one_pass.tree import NODE, SearchSpec
from meshfold.passes.pipeline import search as pipeline_search
from meshfold.passes.pipeline.problem import PipelineProblems
from meshfold.passes.pipeline.search import search_pipelines
from meshfold.passes.pipeline.tree import LAYERS, grow_pipelines
from meshfold.passes.planner.check import price_plan
from meshfold.passes.planner.find import find_plan_for
from meshfold.passes.planner.find_pipeline import _why
from meshfold.passes.rules.ops.experts import EXPERT_LOAD
from meshfold.plan_file.io import plan_from_json, plan_to_json
from meshfold.report.pipeline_timeline import predicted_spans


def plan(family: str = "llama", num_devices: int = 4, layers: int = 2, **options) -> Plan:
    return find_plan_for(
        graph_of(family, layers),
        resolve_cluster("local-cpu", num_devices),
        CompileOptions(**options),
        model_name=family,
        batch_size=BATCH,
        probe=PROBER,
    )


def every_step_s(problems: PipelineProblems, strategy: UniformStrategy) -> list[float]:
    """Steps of all cuts of all layers under one strategy that fit."""
    problem = problems.problem([strategy])
    figures = problems.layer_costs([strategy])
    layers = [figures[i.region][0] for i in problems.folded.instances]
    schedule = Schedule(ScheduleKind.ONE_F_ONE_B, strategy.pp, strategy.microbatches)
    steps = []
    for inner in combinations(range(1, len(layers)), strategy.pp - 1):
        cuts = [0, *inner, len(layers)]
        stages = [layers[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
        needs = [
            sum(x.state_bytes + max(k * x.activation_bytes, x.update_bytes) for x in stage)
            + k * int(problem.chain.resident_bytes[first])
            + max(x.workspace_bytes for x in stage)
            for stage, first, k in zip(stages, cuts, schedule.in_flight, strict=False)
        ]
        if max(needs) > problem.chain.memory_bytes[0]:
            continue
        times = StageTimes.build(
            [sum(x.forward_s for x in s) for s in stages],
            [sum(x.backward_s for x in s) for s in stages],
            hop_s=problem.chain.hop_s[list(inner)],
        )
        once = np.array([sum(x.sync_s for x in s) for s in stages])
        steps.append(float((device_ends_s(schedule, times) + once).max()) + problem.launch_s)
    return steps


@pytest.mark.parametrize("memory_bytes", [None, 450_000])
def test_no_uniform_pipeline_is_faster(memory_bytes):
    problems = problems_of(slow_links(4), memory_bytes=memory_bytes)
    tree = tree_for(4)
    found = search_pipelines(problems, tree)
    assert found.best is not None
    steps = [
        step_s
        for degrees in tree.candidates
        if degrees.pp <= len(problems.folded.instances)
        for strategy in tree.strategies_of(degrees)
        for step_s in every_step_s(problems, strategy)
    ]
    assert found.lower_bound_s <= found.best.step_s
    assert found.lower_bound_s <= min(steps) * (1 + 1e-9)
    gap = found.best.step_s / found.lower_bound_s
    assert found.best.step_s <= min(steps) * min(gap, 1.001) * (1 + 1e-9)


def test_switching_pruning_rules_off_keeps_the_optimum():
    problems = problems_of(slow_links(4))
    best = search_pipelines(problems, tree_for(4)).best
    everything = search_pipelines(problems, tree_for(4, switched_off=(NODE,))).best
    assert best is not None and everything is not None
    assert best.step_s <= everything.step_s * 1.001


def test_more_memory_is_never_slower():
    steps = []
    for memory_bytes in (300_000, 450_000, 700_000, 2_000_000):
        found = search_pipelines(
            problems_of(slow_links(4), memory_bytes=memory_bytes), tree_for(4, {"pp": 2})
        )
        steps.append(
            (np.inf, np.inf) if found.best is None else (found.best.step_s, found.lower_bound_s)
        )
    assert np.isfinite(steps[-1][0])
    for (before_s, _), (step_s, bound_s) in zip(steps, steps[1:], strict=False):
        assert bound_s <= before_s
        assert step_s <= before_s * 1.001


@pytest.mark.parametrize(
    ("family", "pins"), [("gpt2", {"pp": 2}), ("bert", {"pp": 4, "dp": 1, "schedule": "1f1b"})]
)
def test_a_pinned_pipeline_places_every_layer_once(family, pins):
    found = plan(family, pins=pins)
    assert found.strategy.pp == pins["pp"] == len(found.stages)
    assert found.mesh.names[0] == "pp" and found.mesh.num_ranks == 4
    placed = [(run.first + k) for s in found.stages for run in s.runs for k in range(run.count)]
    # Two layers of bert are cut for four stages.
    assert placed == list(range(len(found.pieces or graph_of(family).instances)))
    assert bool(found.pieces) == (family == "bert")
    assert found.time.step_s == pytest.approx(max(s.costs.end_s for s in found.stages))
    assert found.memory.peak == max(s.costs.peak_bytes for s in found.stages)
    assert 0 <= found.gap < 0.05
    names = [row.name for row in found.baselines]
    assert "best uniform 3D" in names
    uniform = found.baselines[names.index("best uniform 3D")]
    assert found.search.lower_bound_s <= uniform.step_s * (1 + 1e-9)


def test_a_pipeline_goes_through_the_file_and_is_emitted():
    pins = {"pp": 2, "microbatches": 2, "schedule": "1f1b"}
    found = plan("gpt2", pins=pins)
    assert found.schedule.startswith("1f1b(2 x 2")
    assert found.pins["schedule"] == "1f1b"
    text = plan_to_json(found)
    assert plan_from_json(text) == found
    assert json.loads(text)["stages"][0]["costs"]["in_flight"] == 2
    emitted = emit_plan(graph_of("gpt2"), found)
    assert isinstance(emitted, EmittedPipeline)
    assert "schedule 1f1b(2 x 2), device 1" in emitted.text(2)
    with pytest.raises(PlanMismatchError, match="microbatches"):
        price_plan(graph_of("gpt2"), found, PROBER)


def test_tied_embeddings_are_on_both_ends():
    """GPT-2's two stages hold the shared matrix each and add its gradients up."""
    problems = PipelineProblems(
        graph_of("gpt2"), resolve_cluster("local-cpu", 2), CompileOptions(), BATCH, PROBER
    )
    (first, *_), _, (last, *_) = problems.layer_costs([UniformStrategy(pp=2, microbatches=2)])
    matrix = graph_of("gpt2").regions[0].graph.values[0].num_bytes
    assert first.parameter_bytes >= matrix and last.parameter_bytes >= matrix
    assert first.tied_s == last.tied_s > 0


def test_experts_are_shared_inside_a_stage():
    """Tokens travel in every microbatch; expert weights are shards, the rest is reduced once."""
    pins = {"pp": 2, "ep": 2, "microbatches": 2, "recompute": "none"}
    found = plan("mixtral", pins=pins)
    assert found.mesh.names == ("pp", "ep")
    shared = [p for r in found.regions for p in r.parameters if p.stored[1].is_shard]
    assert shared and all("experts" in p.name for p in shared)
    over_dp = plan("mixtral", pins={**pins, "ep": 1, "dp": 2})
    assert found.memory.parameters < over_dp.memory.parameters
    assert found.time.communication_s["ep"] > over_dp.time.communication_s["dp"]
    graph = next(r for r in found.regions if any("experts" in p.name for p in r.parameters))
    costs = CostModel(found.cluster, found.mesh)
    tokens, hidden, top = BATCH * SEQUENCE // 2, HIDDEN, 2
    rows_bytes = int(tokens * top * hidden * 4 * EXPERT_LOAD) // 2
    there_s = costs.collective_s("all_to_all", rows_bytes, (1,))
    counts_s = costs.collective_s("all_to_all", 2 * 8, (1,))
    # At least dispatch and combine of the rows, each there and back, with counts once.
    assert graph.communication_s["ep"] > 4 * there_s + counts_s
    of_stages = [
        sum(
            r.communication_s["ep"] * run.count
            for run in s.runs
            for r in found.regions
            if r.name == run.region
        )
        for s in found.stages
    ]
    schedule = Schedule.parse(found.schedule)
    of_devices = [
        sum(of_stages[k] for k in schedule.stages_of(device))
        for device in range(schedule.num_devices)
    ]
    assert found.time.communication_s["ep"] > 2 * min(of_devices) > 0
    assert plan_from_json(plan_to_json(found)) == found


def test_levels_of_zero_trade_memory_for_communication():
    found = []
    for zero, words in enumerate(
        ("reduced once", "gathered and gradients reduced once", "gathered once", "and gradients")
    ):
        pins = {"pp": 2, "dp": 2, "zero": zero, "microbatches": 2, "schedule": "1f1b"}
        found.append(plan("llama", layers=6, pins=pins | {"recompute": "none"}))
        assert any(f"zero {zero}: " in note and words in note for note in found[-1].notes)
        assert plan_from_json(plan_to_json(found[-1])) == found[-1]
    whole, first, second, third = (p.memory for p in found)
    # Stages may be cut elsewhere under another level: each figure is relative to the parameters.
    # Gradients are those at the peak, and not those that are being reduced then; what is reduced
    # with every microbatch is there besides what the one before left.
    for memory, most in ((whole, 1), (first, 2), (second, 2), (third, 2)):
        assert memory.optimizer == 2 * memory.parameters
        assert 0 < memory.gradients <= most * memory.parameters
    # Once per step: all of them until the last backward lets them go.
    assert first.parameters < first.gathered_parameters <= 2 * first.parameters
    assert third.gathered_parameters < second.gathered_parameters <= 2 * second.parameters
    none_s, first_s, second_s, third_s = (p.time.communication_s["dp"] for p in found)
    assert none_s < first_s < second_s < third_s


@pytest.mark.slow
def test_encoder_output_is_resident_on_later_stages():
    folded = graph_of("t5", 6)
    problems = PipelineProblems(
        folded, resolve_cluster("local-cpu", 2), CompileOptions(), BATCH, PROBER
    )
    problem = problems.problem([UniformStrategy(pp=2, microbatches=2)])
    held = problem.chain.resident_bytes
    # Inside the decoder its own activation and the encoder's output cross, before it one of them.
    assert max(held) >= 2 * min(h for h in held[1:-1] if h)
    assert search_pipelines(
        problems, grow_pipelines(SearchSpec(2, 2, BATCH, {"pp": 2}), len(folded.instances))
    ).best


@pytest.mark.parametrize(
    ("pins", "match"),
    [
        ({"pp": 3}, "contradict|keeps them"),
        ({"microbatches": 3}, "divide a batch of 4"),
        ({"pp": 2, "ep": 2}, "ep divides the number of experts"),
        (
            {"schedule": "interleaved", "virtual_stages": 1},
            "schedule=interleaved, virtual_stages=1: .* need 2 or more virtual stages",
        ),
        ({"schedule": "gpipe", "virtual_stages": 2}, "the others have one"),
        ({"schedule": "1f1b", "pp": 1}, "schedule=1f1b, pp=1: no pp > 1"),
    ],
)
def test_pins_that_cannot_be_kept(pins, match):
    with pytest.raises(OptionError, match=match):
        plan("llama", num_devices=4, pins=pins)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "zero_bubble"])
def test_a_pinned_schedule_is_kept(kind):
    found = plan("gpt2", pins={"schedule": kind, "virtual_stages": 1})
    assert found.schedule.startswith(f"{kind}(")
    assert found.strategy.pp > 1
    assert_drawn_as_planned(found)


def assert_drawn_as_planned(found: Plan) -> None:
    """What `timeline` draws of a pipeline ends when the plan says, transfers and W included."""
    spans = predicted_spans(found)
    drawn_s = max(span.end_s for span in spans)
    stated_s = max(s.costs.end_s for s in found.stages)
    assert drawn_s < stated_s < drawn_s + 1e-4  # the launch of the optimizer
    assert any(s.kind == Pass.WEIGHT_GRADIENT for s in spans) == ("zero" in found.schedule)


def test_interleaved_stages_are_written_down():
    found = plan("llama", layers=6, pins={"schedule": "interleaved", "virtual_stages": 3, "pp": 2})
    assert found.schedule.startswith("interleaved(2 x ") and "3 virtual stages" in found.schedule
    assert len(found.stages) == 6
    placed = [run.first + k for s in found.stages for run in s.runs for k in range(run.count)]
    assert placed == list(range(len(graph_of("llama", 6).instances)))
    assert found.time.step_s == pytest.approx(max(s.costs.end_s for s in found.stages))
    assert found.memory.peak == max(s.costs.peak_bytes for s in found.stages)
    assert {s.costs.end_s for s in found.stages[::2]} == {found.stages[0].costs.end_s}
    assert found.gap >= 0
    assert_drawn_as_planned(found)
    assert plan_from_json(plan_to_json(found)) == found


@pytest.mark.parametrize("kind", ["interleaved_zero_bubble", "zbv", "dualpipev"])
def test_chunks_with_a_split_backward_are_planned(kind):
    pins = {"schedule": kind, "virtual_stages": 2, "pp": 2, "microbatches": 4, "recompute": "none"}
    found = plan("llama", layers=6, pins=pins)
    assert found.schedule == f"{kind}(2 x 4, 2 virtual stages)" and len(found.stages) == 4
    schedule = Schedule.parse(found.schedule)
    placed = [run.first + k for s in found.stages for run in s.runs for k in range(run.count)]
    assert placed == list(range(len(graph_of("llama", 6).instances)))
    assert found.time.step_s == pytest.approx(max(s.costs.end_s for s in found.stages))
    ends_s = [{found.stages[s].costs.end_s for s in schedule.stages_of(i)} for i in range(2)]
    assert [len(ends) for ends in ends_s] == [1, 1]
    assert found.memory.peak == max(s.costs.peak_bytes for s in found.stages)
    assert found.search.lower_bound_s <= found.time.step_s
    assert plan_from_json(plan_to_json(found)) == found
    assert isinstance(emit_plan(graph_of("llama", 6), found), EmittedPipeline)


@pytest.mark.parametrize(("kind", "mode"), [("1f1b", "scheduled"), ("zero_bubble", "eager")])
def test_a_split_backward_leaves_nothing_to_schedule(kind, mode):
    pins = {"pp": 2, "microbatches": 2, "schedule": kind}
    found = plan("llama", pins=pins, mode="scheduled")
    assert found.mode == mode
    note = "stages run eager, not scheduled: their schedule splits the backward itself"
    assert (note in found.notes) == (mode == "eager")
    # A file that says otherwise is refused: W would reduce gradients that B has reduced.
    if mode == "eager":
        with pytest.raises(PlanMismatchError, match="mode scheduled: the schedule zero_bubble"):
            emit_plan(graph_of("llama"), replace(found, mode="scheduled"))


@pytest.mark.slow
def test_pipelines_compete_unless_pins_forbid_them():
    found = plan("llama", pins={"pp": 2, "recompute": "selective"})
    assert {region.typing.recompute for region in found.regions} == {"selective"}
    assert plan("llama", pins={"pp": 2}).strategy.pp == 2
    alone = plan("llama", pins={"microbatches": 1})
    assert alone.schedule == "" and not any("pp" in m.mesh for m in alone.search.meshes)
    asked = plan("llama")
    assert asked.time.step_s <= alone.time.step_s
    assert len(asked.search.meshes) > len(alone.search.meshes)
    alone = plan("llama", pins={"pp": 1, "microbatches": 1})
    assert alone.schedule == "" and LAYERS not in alone.search.pruned


def test_pins_that_leave_devices_over_ask_for_stages():
    assert plan(pins={"dp": 1, "tp": 2}, layers=4).strategy.pp == 2
    with pytest.raises(OptionError, match="pin dp=3 cannot be kept on 4 devices; dp can be"):
        plan(pins={"dp": 3})


def test_nothing_fits():
    with pytest.raises(InfeasibleError, match="with or without a pipeline"):
        plan("llama", memory_bytes=10_000, pins={"pp": 2})


def test_pipelines_are_tried_where_nothing_else_fits():
    # Whole parameters on every device are too much, those of a stage are not.
    pins = {"tp": 1, "zero": 0}
    options = {"memory_bytes": 800_000}
    with pytest.raises(InfeasibleError):
        plan("llama", pins=pins | {"microbatches": 1, "pp": 1}, **options)
    found = plan("llama", pins=pins, **options)
    assert found.schedule and found.memory.fits
    assert any("nothing fits while every batch runs in one pass" in note for note in found.notes)
    assert any("train by train_step(batch)" in note for note in found.notes)


def test_without_a_pipeline_what_is_missing_is_named():
    with pytest.raises(InfeasibleError, match="are missing") as caught:
        plan("llama", memory_bytes=10_000)
    assert caught.value.best_candidate and isinstance(caught.value.__cause__, InfeasibleError)


def test_a_search_over_stages_that_finds_nothing_keeps_its_bound(monkeypatch) -> None:
    """What is proven of it may be well below the step that it should have beaten."""
    problems = problems_of(resolve_cluster("local-cpu", 2))
    tree = grow_pipelines(
        SearchSpec(2, 2, BATCH, {"pp": 2, "schedule": "1f1b"}), len(problems.folded.instances)
    )
    step_s = 1.0 + search_pipelines(problems, tree).best.step_s

    class ProvesLittle:
        bound_s = 0.5 * step_s

        def __init__(self, chain, schedules):
            pass

        def close(self, beat_s):
            pass

        def branch(self, beat_s, max_branches):
            pass

        def answer(self, beat_s):
            return self.bound_s

    monkeypatch.setattr(pipeline_search, "StageSearch", ProvesLittle)
    outcome = search_pipelines(problems, tree, step_s=step_s, lower_bound_s=step_s)
    assert outcome.best is None
    assert outcome.lower_bound_s <= 0.51 * step_s
    assert outcome.num_infeasible == 0


def test_a_pipeline_that_only_the_simulator_prefers_says_so() -> None:
    tree = tree_for(2, {"pp": 2, "microbatches": 2})
    best = search_pipelines(problems_of(resolve_cluster("local-cpu", 2)), tree).best
    assert best
    for share, is_said in ((0.9, True), (1.0, False)):
        time = SimpleNamespace(step_s=share * best.step_s)
        first: Any = SimpleNamespace(time=time, step_s=1.0, strategy=UniformStrategy(dp=2))
        notes = list(_why(CompileOptions(), first, best, 0.5 * best.step_s))
        assert any("as simulated, which decides, they take 1.00 s" in x for x in notes) == is_said
