"""Layers that share their parameters: in plans these count once, however they are shared, and the
programs compute what one process does."""

from typing import Any

import pytest
from support.models.factories import deep

import meshfold
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.validation.verify import verify

NUM_IN_BLOCK = 16 * 32 + 32 + 32 * 16
NUM_PARAMETERS = 8 * 16 + 16 + NUM_IN_BLOCK + 16 * 4 + 4
"""Of one block, and what is around it."""
BUFFER_BYTES = 4 * 16
ONE_PASS: dict[str, Any] = {"dp": 2, "microbatches": 1}


def plan_of(sharing: str, pins: dict[str, Any]) -> Plan:
    model, batch = deep(sharing)
    return meshfold.find_plan(model, "local-cpux2", batch, options=CompileOptions(pins=pins))


@pytest.mark.parametrize("sharing", ["called", "placed", "tied"])
def test_in_one_pass(sharing: str) -> None:
    plan = plan_of(sharing, {**ONE_PASS, "zero": 0})
    assert plan.model.num_parameters == NUM_PARAMETERS
    assert plan.memory.parameters == 4 * NUM_PARAMETERS + BUFFER_BYTES
    assert plan.memory.optimizer == 2 * 4 * NUM_PARAMETERS
    sharded = plan_of(sharing, {**ONE_PASS, "zero": 3})
    assert sharded.memory.parameters == 4 * NUM_PARAMETERS // 2 + BUFFER_BYTES
    assert sharded.memory.optimizer == 4 * NUM_PARAMETERS
    alone = plan_of("none", {**ONE_PASS, "zero": 0})
    assert plan.time.optimizer_s < alone.time.optimizer_s


def test_in_several_microbatches() -> None:
    pins = {"dp": 2, "zero": 0, "microbatches": 2}
    plan, alone = plan_of("called", pins), plan_of("none", pins)
    assert plan.memory.parameters == 4 * NUM_PARAMETERS
    assert plan.memory.optimizer == 2 * 4 * NUM_PARAMETERS
    assert plan.time.optimizer_s < alone.time.optimizer_s
    # The gradient of each use is added up and reduced by itself, and at the end there is their sum.
    assert plan.memory.gradients == alone.memory.gradients + 4 * NUM_IN_BLOCK
    on_one = plan_of("called", {"tp": 2, "dp": 1, "microbatches": 2}).memory
    assert on_one.gradients < alone.memory.gradients / 2


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "pins",
    [
        {"dp": 2, "zero": 3, "microbatches": 1},
        {"dp": 2, "zero": 1, "microbatches": 2},
        {"tp": 2, "microbatches": 2},
        {"pp": 2, "microbatches": 2},
    ],
)
def test_gradients_are_those_of_one_process(pins: dict[str, Any]) -> None:
    report = verify(plan_of("called", pins), "support.models.factories:deep_shared")
    assert report.passed, report.verdict
