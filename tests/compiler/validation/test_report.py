"""What verify calls different."""

import math

import pytest
from support.programs.plans import example_plan

from meshfold.ir.plan import Plan
from meshfold.validation.collective_order import StartedCollective
from meshfold.validation.report import TOLERANCE, TensorDifference, VerifyReport, differences
from meshfold.validation.verify import _Compared, _report


@pytest.fixture
def plan() -> Plan:
    return example_plan()


def report_of(plan: Plan, *ranks: dict[str, tuple[float, float]]) -> VerifyReport:
    return _report(plan, [_Compared(2.0, 2.0, gradients, {}, ()) for gradients in ranks])


def test_differences_are_relative_to_the_largest_entry_of_their_tensor(plan: Plan) -> None:
    report = report_of(
        plan,
        {"large": (10.0, 1e-12), "small": (1e-15, 0.0)},
        {"large": (10.0, 1e-13), "small": (1e-15, 1e-18)},
    )
    assert report.gradients == (
        TensorDifference("small", 1e-15, 1e-18, 1e-3),
        TensorDifference("large", 10.0, 1e-12, 1e-13),
    )
    assert not report.passed


def test_outputs_are_compared_and_named(plan: Plan) -> None:
    found = _Compared(2.0, 2.0, {"w": (1.0, 0.0)}, {}, (), outputs={"logits": (2.0, 2e-3)})
    report = _report(plan, [found])
    assert not report.passed
    assert report.verdict.startswith("1 of 1 outputs differ, worst logits by 1.0e-03")
    right = _report(plan, [_Compared(2.0, 2.0, {"w": (1.0, 0.0)}, {}, (), outputs={"y": (1.0, 0)})])
    assert right.verdict == "loss, 1 outputs and 1 gradients agree to 1e-10"


def test_what_is_zero_but_for_rounding_is_relative_to_its_terms() -> None:
    sizes = [{"large": (1.0, 0.0), "noise": (1e-17, 2e-17), "tiny": (1e-17, 1e-20)}]
    found = differences(sizes, {"large": 1e-16, "noise": 1e-17, "tiny": 1e-32})
    assert {d.name: d.relative <= TOLERANCE for d in found} == {
        "large": True,
        "noise": True,
        "tiny": False,
    }
    # However much rounding there is, terms are not larger than any gradient or the loss.
    assert differences([{"a": (1.0, 1e-3)}], {"a": 1e-5})[0].relative == 1e-3
    assert differences([{"a": (0.0, 1e-9)}], {"a": 1e-12}, bound=10.0)[0].relative == 1e-10
    assert differences([{"a": (0.0, 1e-9)}])[0].relative == math.inf
    assert differences([{"a": (0.0, 0.0)}])[0].relative == 0.0


def test_a_first_step_that_is_right_and_later_ones_that_are_not() -> None:
    right, wrong = (TensorDifference("w", 1.0, d, d) for d in (0.0, 1e-3))
    assert VerifyReport(2, "dp2", 1.0, 1.0, (right,), parameters=(wrong,)).only_parameters_differ
    assert not VerifyReport(
        2, "dp2", 1.0, 1.0, (wrong,), parameters=(wrong,)
    ).only_parameters_differ
    assert not VerifyReport(
        2, "dp2", 1.0, 2.0, (right,), parameters=(wrong,)
    ).only_parameters_differ
    assert not VerifyReport(
        2, "dp2", 1.0, 1.0, (right,), parameters=(right,)
    ).only_parameters_differ


def test_what_rounding_alone_moves_as_far_agrees_and_says_so() -> None:
    """A model that does not agree with itself: nothing more can be said of it."""
    (found,) = differences([{"a": (1.0, 1e-3)}], {"a": 1e-4})
    assert 0 < found.relative < TOLERANCE
    assert found.rounding == 1e-4
    report = VerifyReport(2, "dp2", 1.0, 1.0, (), parameters=(found,), optimizer="AdamW")
    assert report.passed
    assert report.verdict.endswith("or to what rounding alone does to the model (1e-04)")
    (wrong,) = differences([{"a": (1.0, 1e-3)}], {"a": 1e-5})
    assert wrong.relative == 1e-3 and wrong.rounding == 0.0
    assert "rounding" not in VerifyReport(2, "dp2", 1.0, 1.0, (wrong,)).verdict
    (exact,) = differences([{"a": (1.0, 1e-12)}], {"a": 1e-4})
    assert exact.rounding == 0.0


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
    axes = ("dp",)
    logs = [
        tuple(StartedCollective("all_reduce", axes, "float64", (n,)) for n in sizes)
        for sizes in ([2], [3], *[[2]] * 6)
    ]
    report = _report(plan, [_Compared(2.0, 2.0, gradients, gradients, log) for log in logs])
    assert not report.passed and report.num_collectives == 1
    assert "ranks start different collectives: as number 0 over" in report.verdict


def test_a_loss_that_is_no_number_is_the_models() -> None:
    report = VerifyReport(2, "tp2", float("nan"), float("nan"), (), first_divergence="the program")
    assert not report.passed
    assert report.verdict == (
        "the loss of the model in one process is nan, which can be compared with nothing; mend the "
        "model, or give example inputs of which it is finite"
    )
