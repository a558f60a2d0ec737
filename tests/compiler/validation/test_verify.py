"""verify: what it compares, and what it calls different."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.models import hard_to_verify, returns
from support.models.draws import drop_path
from support.models.factories import classes, regression, switch
from support.models.functions import ruled_functions
from support.models.hard_to_verify import encoder
from support.models.hugging_face import tiny_model
from support.processes.pool import Pools

from meshfold.api import find_plan
from meshfold.errors import MeshfoldError
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.models.from_argument import BuiltModel
from meshfold.plan_file.io import plan_to_json
from meshfold.validation.alike_draws import without_dropout
from meshfold.validation.float64_mode import float64_everywhere
from meshfold.validation.verify import _eager_step, _report, verify

MODEL = "support.models.factories:regression"
HARD_TO_COMPARE = (
    *("encoder", "after_a_backward", "decayed", "wrapped_experts", "odd_names", "frozen_half"),
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    model, inputs = regression()
    options = CompileOptions(pins={"dp": 2, "zero": 3})
    return find_plan(model, "local-cpux2", inputs, options=options)


@pytest.mark.parametrize(
    ("optimizer", "name"), [("adamw", "AdamW"), ("adamw_fused", "fused AdamW")]
)
@pytest.mark.multiprocess
def test_a_right_program_passes(pools: Pools, plan: Plan, optimizer: str, name: str) -> None:
    plan = replace(plan, optimizer=optimizer)
    results = pools.run(2, "support.processes.verify:compare", plan_to_json(plan), MODEL)
    report = _report(plan, results)
    assert report.passed
    assert report.strategy == "dp2, zero3"
    assert max(g.relative for g in report.gradients) < 1e-13
    assert max(p.relative for p in report.parameters) < 1e-13
    assert report.verdict == (
        f"loss, 3 gradients and parameters after 3 steps of {name} agree to 1e-10"
    )


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_model_that_draws_is_compared_with_itself(pools: Pools) -> None:
    """Drop path, noise and gates of the model in one process are those of the ranks."""
    options = CompileOptions(pins={"dp": 2, "zero": 3})
    model, inputs = drop_path()
    plan = find_plan(model, "local-cpux2", inputs, options=options)
    factory = "support.models.draws:drop_path"
    results = pools.run(2, "support.processes.verify:compare", plan_to_json(plan), factory)
    report = _report(plan, results)
    assert report.passed and max(g.relative for g in report.gradients) < 1e-12


@pytest.mark.slow
@pytest.mark.multiprocess
def test_functions_and_rules_of_a_factory_are_verified(pools: Pools) -> None:
    model, inputs, rule = ruled_functions()
    options = CompileOptions(pins={"dp": 2, "zero": 3}, custom_rules=(rule,))
    plan = find_plan(model, "local-cpux2", inputs, options=options)
    factory = "support.models.functions:ruled_functions"
    results = pools.run(2, "support.processes.verify:compare", plan_to_json(plan), factory)
    report = _report(plan, results)
    assert report.passed and max(g.relative for g in report.gradients) < 1e-12


@pytest.mark.multiprocess
def test_a_wrong_gradient_is_found_and_named(pools: Pools, plan: Plan) -> None:
    text = plan_to_json(plan)
    results = pools.run(
        2, "support.processes.verify:compare_a_wrong_program", text, MODEL, "up.bias"
    )
    report = _report(plan, results)
    assert not report.passed
    assert report.gradients[0].name == "up.bias"
    assert report.gradients[0].relative == pytest.approx(1e-6, rel=1e-3)
    assert "1 of 3 gradients differ, worst up.bias by 1.0e-06" in report.verdict


@pytest.mark.multiprocess
def test_ranks_compare_the_same_numbers(pools: Pools, plan: Plan) -> None:
    model = "support.models.factories:unseeded"
    results = pools.run(2, "support.processes.verify:compare", plan_to_json(plan), model)
    assert results[0].eager_loss == results[1].eager_loss
    assert _report(plan, results).passed


def test_a_model_without_values_is_refused(plan: Plan) -> None:
    with pytest.raises(MeshfoldError, match="on_meta: the model is on the meta device"):
        verify(plan, "support.models.factories:on_meta")


def test_statistics_of_each_microbatch_are_not_those_of_one_process(plan: Plan) -> None:
    several = replace(plan.strategy, microbatches=2)
    own = replace(plan, strategy=several, pins={"batch_norm": "microbatch"})
    with pytest.raises(MeshfoldError, match="under batch_norm=microbatch each microbatch has"):
        verify(own, "anything:at_all")


def test_without_dropout_nothing_is_dropped() -> None:
    x = torch.ones(4, 2, 8, 8)
    with without_dropout():
        assert torch.equal(F.dropout(x, 0.9, True), x)
        assert torch.equal(F.dropout(x, p=0.9, training=True), x)
        assert torch.equal(torch.nn.Dropout(0.9)(x), x)
        attention = F.scaled_dot_product_attention(x, x, x, dropout_p=0.9)
    assert torch.allclose(attention, F.scaled_dot_product_attention(x, x, x))
    assert not torch.equal(F.dropout(x, 0.9, True), x)


def test_a_mixture_of_experts_runs_in_float64() -> None:
    model, batch = tiny_model("mixtral")
    with float64_everywhere():
        expected = model(**batch).loss
    model.config._experts_implementation = "grouped_mm"
    assert torch.equal(_eager_step(BuiltModel(model, batch), "loss"), expected)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_microbatches_are_verified_too(pools: Pools) -> None:
    name = "support.models.factories:classes"
    model, inputs = classes()
    options = CompileOptions(pins={"dp": 2, "zero": 3, "microbatches": 2})
    plan = find_plan(model, "local-cpux2", inputs, options=options)
    report = _report(
        plan, pools.run(2, "support.processes.verify:compare", plan_to_json(plan), name)
    )
    assert report.passed and len(report.gradients) == 3
    assert "2 microbatches" in report.strategy
    text = plan_to_json(plan)
    wrong = pools.run(2, "support.processes.verify:compare_a_wrong_program", text, name, "up.bias")
    assert "worst up.bias by 1.0e-06" in _report(plan, wrong).verdict


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    "pins", [{"ep": 4}, {"dp": 2, "ep": 2, "zero": 3}, {"ep": 2, "tp": 2}], ids=str
)
def test_an_expert_that_nobody_chooses_decays_as_in_the_graph(
    pools: Pools, pins: dict[str, int]
) -> None:
    model, inputs = switch()
    plan = find_plan(model, "local-cpux4", inputs, options=CompileOptions(pins=pins))
    name = "support.models.factories:switch"
    report = _report(
        plan, pools.run(4, "support.processes.verify:compare", plan_to_json(plan), name)
    )
    assert report.passed
    assert max(p.relative for p in (*report.gradients, *report.parameters)) < 1e-12


def test_the_loss_of_an_output_of_any_class_is_found() -> None:
    model, batch = encoder()
    loss = _eager_step(BuiltModel(model, batch), "loss")
    assert loss.ndim == 0 and all(p.grad is not None for p in model.parameters())


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("name", HARD_TO_COMPARE)
def test_right_programs_of_models_that_are_hard_to_compare_pass(pools: Pools, name: str) -> None:
    model, inputs = getattr(hard_to_verify, name)()
    options = CompileOptions(pins={"tp": 2}, mode="scheduled")
    plan = find_plan(model, "local-cpux2", inputs, options=options)
    argument = f"support.models.hard_to_verify:{name}"
    results = pools.run(2, "support.processes.verify:compare", plan_to_json(plan), argument)
    report = _report(plan, results)
    assert report.passed, report.verdict


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "outputs"),
    [("decoder_with_outputs", 4), ("classifier_with_criterion", 1)],
)
def test_outputs_and_loss_functions_are_verified_too(
    pools: Pools, factory: str, outputs: int
) -> None:
    model, inputs, *loss_fn = getattr(returns, factory)()
    options = CompileOptions(pins={"dp": 2, "zero": 3}, outputs="all")
    plan = find_plan(
        model, "local-cpux2", inputs, options=options, loss_fn=next(iter(loss_fn), None)
    )
    argument = f"support.models.returns:{factory}"
    results = pools.run(2, "support.processes.verify:compare", plan_to_json(plan), argument)
    report = _report(plan, results)
    assert report.passed and f"loss, {outputs} outputs, " in report.verdict
    assert max(d.relative for d in report.outputs) < 1e-13
