"""What the search proved, as text."""

import io
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType
from support.programs.plans import example_plan

from meshfold.ir.plan import Mode, Plan
from meshfold.ir.step_events import SimulatedStep
from meshfold.report.plan import plan_view, summary_view
from meshfold.report.search import explain_view, proof_text

DISCLAIMER = "this is no bound of the simulated step"


def simulated_in(step_s: float, mode: Mode) -> Plan:
    """The example, whose bound is 0.32 s, with a simulated step."""
    step = SimulatedStep(step_s, 0.0, 0.0, (), 0, 0.0)
    return replace(example_plan(), simulated=step, mode=mode)


def page_of(view: RenderableType) -> str:
    stream = io.StringIO()
    Console(file=stream, width=80).print(view)
    return " ".join(stream.getvalue().split())


@pytest.mark.parametrize("mode", ["eager", "scheduled"])
def test_no_bound_above_the_simulated_step_is_printed_without_saying_so(mode: Mode) -> None:
    plan = simulated_in(0.3, mode)
    assert plan.simulated is not None and plan.simulated.step_s < plan.search.lower_bound_s
    assert "which is no bound of the simulated step" in page_of(summary_view(plan))
    for view in (plan_view(plan), explain_view(plan, plan.regions)):
        page = page_of(view)
        claims = page.split("no plan of this search is faster than 320 ms")[1:]
        assert claims and all(c.startswith(f"; {DISCLAIMER}") for c in claims)


def test_a_bound_below_the_simulated_step_is_plain() -> None:
    assert proof_text(simulated_in(0.4, "eager")).startswith(
        "no plan of this search is faster than 320 ms: optimality gap"
    )


def test_what_simulation_passed_over_is_told_from_what_is_unproven() -> None:
    plan = simulated_in(0.4, "eager")
    assert "unproven" not in proof_text(plan) and plan.unproven_gap == plan.gap
    passed = replace(plan, search=replace(plan.search, least_s=0.3232))
    assert passed.gap == plan.gap and passed.unproven_gap == pytest.approx(0.01)
    words = "6.50 %, 1.00 % of it unproven: simulation passed over a plan that adds up to less"
    assert words in proof_text(passed) and words.split(", ")[1] in page_of(summary_view(passed))
    fits = replace(passed, search=replace(passed.search, unlimited_s=0.3232))
    assert passed.memory_costs > 0.05 and fits.memory_costs == 0
    assert "memory limit" not in proof_text(fits), "simulation passed a sum over, not the limit"
    slower = replace(plan, search=replace(plan.search, least_s=0.5))
    assert slower.unproven_gap == plan.gap
    nothing = replace(plan, search=replace(plan.search, lower_bound_s=0.0))
    assert nothing.unproven_gap == nothing.gap == float("inf")


def test_overlap_inside_layers_is_not_bounded() -> None:
    assert proof_text(simulated_in(0.4, "scheduled")) == (
        "in the additive model, which is without overlap inside layers, no plan of this search is "
        "faster than 320 ms; this is no bound of the simulated step: optimality gap 6.50 %; the "
        "memory limit costs 13.6 %"
    )
