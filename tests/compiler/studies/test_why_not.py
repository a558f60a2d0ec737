"""Why a plan does not keep a pin, on a small model."""

from dataclasses import replace

import pytest

from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import OptionError, PlanMismatchError
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.studies.captured_models import CapturedModels
from meshfold.studies.why_not import options_of, why_not

MODEL = "support.models.factories:regression"


def made(**options: object) -> Plan:
    given = CompileOptions(**options)  # type: ignore[arg-type]
    return CapturedModels(MODEL, 8).plan(resolve_cluster("local-cpux2"), given, batch=8)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return made()


def test_options_give_the_same_plan_again(plan: Plan) -> None:
    models = CapturedModels(MODEL, 8)
    assert models.plan(plan.cluster, options_of(plan), batch=8) == plan
    pinned = made(pins={"tp": 2}, optimizer="sgd", memory_bytes=10**9, seed=3)
    assert models.plan(pinned.cluster, options_of(pinned), batch=8) == pinned


def test_a_pin_that_costs_something(plan: Plan) -> None:
    other = {"dp": 3 - plan.strategy.dp, "tp": 3 - plan.strategy.tp}
    told: list[str] = []
    answer = why_not(plan, MODEL, other, told.append)
    assert answer.pinned is not None and answer.parts is not None and not answer.is_kept
    assert answer.pinned.strategy.dp == other["dp"]
    assert answer.parts[1].step_s >= answer.parts[0].step_s
    assert [change.what for change in answer.changes] == [
        "memory per device",
        "bandwidth of loopback",
        "batch",
    ]
    assert len(told) == 3


def test_a_pin_that_is_kept_is_not_planned(plan: Plan) -> None:
    answer = why_not(plan, MODEL, {"tp": plan.strategy.tp})
    assert answer.is_kept and not answer.changes


def test_a_pin_that_a_rule_forbids(plan: Plan) -> None:
    answer = why_not(plan, MODEL, {"tp": 3})
    assert answer.pinned is None and answer.unlimited is None and not answer.changes
    assert answer.refusal.startswith("pin tp=3 cannot be kept on 2 devices")


def test_a_pin_that_memory_forbids(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the plan had been made for devices of a kilobyte."""
    monkeypatch.setattr("meshfold.studies.why_not.changes", lambda *_: iter(()))
    tight = replace(plan, memory=replace(plan.memory, capacity=1000))
    answer = why_not(tight, MODEL, {"tp": 2 if plan.strategy.tp == 1 else 1})
    assert answer.pinned is None and "are missing" in answer.refusal
    assert answer.unlimited is not None and answer.unlimited.memory.peak > 1000


def test_another_model_and_a_pin_that_does_not_exist(plan: Plan) -> None:
    with pytest.raises(PlanMismatchError):
        why_not(plan, "support.models.factories:classification", {"tp": 3})
    with pytest.raises(OptionError, match="pin 'xp' is unknown"):
        why_not(plan, MODEL, {"xp": 2})


def test_a_scheduled_plan_is_not_searched_for_changes(plan: Plan) -> None:
    """It takes seconds to plan one."""
    scheduled = made(mode="scheduled", pins={"dp": plan.strategy.dp, "tp": plan.strategy.tp})
    other = {"dp": 3 - plan.strategy.dp, "tp": 3 - plan.strategy.tp}
    answer = why_not(scheduled, MODEL, other)
    assert answer.pinned is not None and answer.pinned.mode == "scheduled"
    assert "mode eager alone" in answer.notes[0] and not answer.changes
