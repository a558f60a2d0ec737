"""verify: what it compares, and what it calls different."""

import math

import pytest
import torch
import torch.nn.functional as F
from pool import Pools
from support_factories import classes, regression, switch
from support_models import tiny_model

from meshfold.api import find_plan
from meshfold.errors import MeshfoldError
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.ir.spmd import PARTIAL, Experts, Shard
from meshfold.models.from_argument import BuiltModel
from meshfold.plan_file.io import plan_to_json
from meshfold.validation.collective_order import Call
from meshfold.validation.first_divergence import _is_known, _Seen
from meshfold.validation.float64_mode import float64_everywhere
from meshfold.validation.report import Difference, VerifyReport
from meshfold.validation.verify import _Compared, _eager_step, _report, verify, without_dropout

MODEL = "support_factories:regression"


@pytest.fixture(scope="module")
def plan() -> Plan:
    model, inputs = regression()
    options = CompileOptions(pins={"dp": 2, "zero": 3})
    return find_plan(model, "local-cpux2", inputs, options=options)


@pytest.mark.multiprocess
def test_a_right_program_passes(pools: Pools, plan: Plan) -> None:
    results = pools.run(2, "support_verify:compare", plan_to_json(plan), MODEL)
    report = _report(plan, results)
    assert report.passed
    assert report.strategy == "dp2, zero3"
    assert max(g.relative for g in report.gradients) < 1e-13
    assert max(p.relative for p in report.parameters) < 1e-13
    assert report.verdict == (
        "loss, 3 gradients and parameters after 3 steps of AdamW agree to 1e-10"
    )


@pytest.mark.multiprocess
def test_a_wrong_gradient_is_found_and_named(pools: Pools, plan: Plan) -> None:
    text = plan_to_json(plan)
    results = pools.run(2, "support_verify:compare_a_wrong_program", text, MODEL, "up.bias")
    report = _report(plan, results)
    assert not report.passed
    assert report.gradients[0].name == "up.bias"
    assert report.gradients[0].relative == pytest.approx(1e-6, rel=1e-3)
    assert "1 of 3 gradients differ, worst up.bias by 1.0e-06" in report.verdict


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("node", "says"),
    [
        ("relu", "the first value that differs is aten.relu.default (op 1)"),
        (
            "relu backward",
            "the first gradient that differs is that of aten.linear.default",
        ),
    ],
)
def test_the_first_op_that_departs_is_named(pools: Pools, plan: Plan, node: str, says: str) -> None:
    text = plan_to_json(plan)
    results = pools.run(2, "support_verify:compare_with_a_wrong_op", text, MODEL, *node.split())
    report = _report(plan, results)
    assert not report.passed
    assert says in report.verdict


@pytest.mark.multiprocess
def test_ranks_compare_the_same_numbers(pools: Pools, plan: Plan) -> None:
    model = "support_factories:unseeded"
    results = pools.run(2, "support_verify:compare", plan_to_json(plan), model)
    assert results[0].eager_loss == results[1].eager_loss
    assert _report(plan, results).passed


def test_rows_at_their_experts_are_not_those_of_the_whole() -> None:
    """As many as the routing says, in order of arrival."""
    row = torch.zeros(3, 2)
    for layout, known in ((Shard(0), True), (Experts(), False), (PARTIAL, False)):
        assert _is_known(_Seen((0, 0), (layout,), row, True), "P") == known


def test_a_model_without_values_is_refused(plan: Plan) -> None:
    with pytest.raises(MeshfoldError, match="on_meta: the model is on the meta device"):
        verify(plan, "support_factories:on_meta")


def report_of(plan: Plan, *ranks: dict[str, tuple[float, float]]) -> VerifyReport:
    return _report(plan, [_Compared(2.0, 2.0, gradients, {}, ()) for gradients in ranks])


def test_differences_are_relative_to_gradients_that_are_not_noise(plan: Plan) -> None:
    report = report_of(
        plan,
        {"large": (10.0, 1e-12), "small": (0.1, 0.0), "noise": (1e-17, 2e-17)},
        {"large": (10.0, 1e-13), "small": (0.1, 1e-3), "noise": (1e-17, 1e-17)},
    )
    assert report.gradients == (
        Difference("small", 0.1, 1e-3, 1e-2),
        Difference("large", 10.0, 1e-12, 1e-13),
        Difference("noise", 1e-17, 2e-17, 2e-15),
    )
    assert not report.passed


def test_nan_is_the_worst_difference(plan: Plan) -> None:
    report = report_of(
        plan, {"a": (1.0, 0.5), "b": (1.0, math.nan)}, {"a": (1.0, 0), "b": (1.0, 0)}
    )
    assert report.gradients[0].name == "b"
    assert not report.passed
    assert "2 of 2 gradients differ, worst b by nan" in report.verdict


def test_parameters_that_differ_after_steps_fail(plan: Plan) -> None:
    gradients = {"a": (1.0, 0.0), "b": (1.0, 0.0)}
    ranks = [
        _Compared(2.0, 2.0, gradients, {"a": (1.0, 0.0), "b": (2.0, d)}, ()) for d in (0.0, 1e-6)
    ]
    report = _report(plan, ranks)
    assert not report.passed
    assert "1 of 2 parameters differ after 3 steps, worst b by 5.0e-07" in report.verdict


def test_a_loss_that_differs_fails() -> None:
    report = VerifyReport(2, "tp2", 2.0, 2.5, ())
    assert not report.passed
    assert report.verdict.startswith("the losses differ, 2.5 against 2.0; report it")


def test_ranks_that_start_other_collectives_fail(plan: Plan) -> None:
    gradients = {"a": (1.0, 0.0)}
    axes = tuple(a.name for a in plan.mesh.axes if a.size > 1)[:1]
    logs = [tuple(Call("all_reduce", axes, "float64", (n,)) for n in sizes) for sizes in ([2], [3])]
    report = _report(plan, [_Compared(2.0, 2.0, gradients, gradients, log) for log in logs])
    assert not report.passed and report.num_collectives == 1
    assert "ranks start different collectives: as number 0 over" in report.verdict


def test_without_dropout_nothing_is_dropped() -> None:
    x = torch.ones(4, 2, 8, 8)
    with without_dropout():
        for drop in (F.dropout, F.dropout2d, F.alpha_dropout, F.feature_alpha_dropout):
            assert torch.equal(drop(x, 0.9, True), x)
            assert torch.equal(drop(x, p=0.9, training=True), x)
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
    name = "support_factories:classes"
    model, inputs = classes()
    options = CompileOptions(pins={"dp": 2, "zero": 3, "microbatches": 2})
    plan = find_plan(model, "local-cpux2", inputs, options=options)
    report = _report(plan, pools.run(2, "support_verify:compare", plan_to_json(plan), name))
    assert report.passed and len(report.gradients) == 3
    assert "2 microbatches" in report.strategy
    text = plan_to_json(plan)
    wrong = pools.run(2, "support_verify:compare_a_wrong_program", text, name, "up.bias")
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
    name = "support_factories:switch"
    report = _report(plan, pools.run(4, "support_verify:compare", plan_to_json(plan), name))
    assert report.passed
    assert max(p.relative for p in (*report.gradients, *report.parameters)) < 1e-12
