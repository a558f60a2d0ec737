"""A plan priced anew, and what an edit may not do."""

from dataclasses import replace
from functools import cache

import pytest
from support.models.hugging_face import BATCH, tiny_model, with_padding
from support.processes.ring import slow_devices

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import PlanMismatchError
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.ir.spmd import INVARIANT, REPLICATE, PaddedShard, Shard
from meshfold.ir.strategy import Degrees
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.planner.check import price_plan
from meshfold.passes.planner.find import find_plan_for
from meshfold.plan_file.io import plan_from_json, plan_to_json

PROBER = OpProber()


@cache
def llama() -> FoldedGraph:
    return capture(*tiny_model("llama", layers=3)).graph


@cache
def planned() -> Plan:
    return find_plan_for(
        llama(),
        resolve_cluster("local-cpu", 4),
        CompileOptions(pins={"dp": 2, "tp": 2, "zero": 3, "sp": 1}),
        model_name="llama",
        batch_size=BATCH,
        probe=PROBER,
    )


def edited(region: int, **changes) -> Plan:
    """The plan with fields of one region's typing replaced."""
    regions = list(planned().regions)
    typing = replace(regions[region].typing, **changes)
    regions[region] = replace(regions[region], typing=typing)
    return replace(planned(), regions=tuple(regions))


def test_an_unchanged_plan_keeps_its_figures() -> None:
    priced = price_plan(llama(), planned(), PROBER)
    assert priced.time == planned().time and priced.memory == planned().memory
    for new, old in zip(priced.regions, planned().regions, strict=True):
        assert (new.forward_s, new.parameters, new.conversions) == (
            old.forward_s,
            old.parameters,
            old.conversions,
        )


def test_a_plan_with_stages_or_microbatches_is_not_priced() -> None:
    with pytest.raises(PlanMismatchError, match="with stages or microbatches cannot be priced"):
        price_plan(llama(), replace(planned(), schedule="1f1b(2 x 1)"), PROBER)


def test_a_parameter_stored_unsharded_costs_memory_and_no_gather() -> None:
    slots = list(planned().regions[1].typing.slots)
    at = planned().regions[1].slot_names.index("mlp.up_proj.weight")
    assert slots[at][0].is_shard
    slots[at] = (INVARIANT, slots[at][1])
    priced = price_plan(llama(), edited(1, slots=tuple(slots)), PROBER)
    assert priced.memory.parameters > planned().memory.parameters
    collectives = [
        next(c.forward for c in plan.regions[1].conversions if c.value == "mlp.up_proj.weight")
        for plan in (planned(), priced)
    ]
    assert collectives == [("all_gather",), ()]
    stored = {p.name: p for p in priced.regions[1].parameters}
    assert stored["mlp.up_proj.weight"].stored[0] == INVARIANT


def test_recomputation_costs_time() -> None:
    priced = price_plan(llama(), edited(1, recompute="full"), PROBER)
    assert priced.time.backward_s > planned().time.backward_s
    assert priced.regions[1].saved_bytes < planned().regions[1].saved_bytes


def op_of(region: int, target: str) -> int:
    return next(k for k, name in enumerate(planned().regions[region].op_targets) if target in name)


def with_op(k: int, **changes) -> Plan:
    ops = list(planned().regions[1].typing.ops)
    ops[k] = replace(ops[k], **changes)
    return edited(1, ops=tuple(ops))


def test_a_rule_that_does_not_exist_is_named_with_those_that_do() -> None:
    k = op_of(1, "linear")
    with pytest.raises(PlanMismatchError, match=rf"region B, op {k} aten.linear.* no rule 'zz' on"):
        price_plan(llama(), with_op(k, rules=("zz", "I")), PROBER)


def test_layouts_that_are_not_the_rules_are_refused() -> None:
    k = op_of(1, "linear")
    typing = planned().regions[1].typing.ops[k]
    wrong = (tuple(REPLICATE for _ in typing.inputs[0]), *typing.inputs[1:])
    with pytest.raises(PlanMismatchError, match=rf"op {k} aten.linear.default: rules .* give"):
        price_plan(llama(), with_op(k, inputs=wrong), PROBER)


def test_a_layout_that_does_not_divide_is_refused() -> None:
    slots = list(planned().regions[1].typing.slots)
    at = planned().regions[1].slot_names.index("mlp.up_proj.weight")
    slots[at] = (Shard(0, 3), slots[at][1])
    with pytest.raises(PlanMismatchError, match="mlp.up_proj.weight: .* does not cut .* evenly"):
        price_plan(llama(), edited(1, slots=tuple(slots)), PROBER)


def test_a_value_that_is_no_parameter_is_not_padded() -> None:
    slots = list(planned().regions[1].typing.slots)
    slots[0] = (PaddedShard(0), INVARIANT)
    with pytest.raises(PlanMismatchError, match=r"S0\+,.* pads a dim; only parameters"):
        price_plan(llama(), edited(1, slots=tuple(slots)), PROBER)


def test_runs_that_lose_a_layer_are_refused() -> None:
    (stage,) = planned().stages
    lost = replace(planned(), stages=(replace(stage, runs=stage.runs[:-1]),))
    with pytest.raises(PlanMismatchError, match="it places 4 of 5 layers"):
        price_plan(llama(), lost, PROBER)
    twice = replace(planned(), stages=(stage, stage))
    with pytest.raises(PlanMismatchError, match="its runs place layer 5 elsewhere or not at all"):
        price_plan(llama(), twice, PROBER)


def test_a_plan_with_shared_experts_keeps_its_figures_in_a_file() -> None:
    graph = capture(*tiny_model("mixtral")).graph
    plan = find_plan_for(
        graph,
        resolve_cluster("local-cpu", 8),
        CompileOptions(pins={"dp": 2, "ep": 2, "tp": 2, "zero": 3, "sp": 0}),
        model_name="mixtral",
        batch_size=BATCH,
        probe=PROBER,
    )
    text = plan_to_json(plan)
    assert plan.strategy.degrees == Degrees(2, tp=2, ep=2) and "E0/2" in text
    again = plan_from_json(text)
    assert again.strategy == plan.strategy
    priced = price_plan(graph, again, PROBER)
    assert priced.time == plan.time and priced.memory == plan.memory


def test_a_plan_with_keys_that_go_round_keeps_its_figures_in_a_file() -> None:
    model, batch = tiny_model("llama")
    graph = capture(model, with_padding(batch)).graph
    plan = find_plan_for(
        graph,
        slow_devices(4),
        CompileOptions(pins={"dp": 1, "cp": 2, "tp": 2, "sp": 1}),
        model_name="llama",
        batch_size=BATCH,
        probe=PROBER,
    )
    text = plan_to_json(plan)
    assert "ring/2" in text
    priced = price_plan(graph, plan_from_json(text), PROBER)
    assert priced.time == plan.time and priced.memory == plan.memory
