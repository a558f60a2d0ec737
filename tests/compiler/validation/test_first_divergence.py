"""The first op whose value or gradient differs."""

import pytest
import torch
from support.models.factories import regression
from support.processes.pool import Pools

from meshfold.api import find_plan
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.ir.spmd import PARTIAL, Experts, Shard
from meshfold.plan_file.io import plan_to_json
from meshfold.validation.first_divergence import LocalValue, _is_known
from meshfold.validation.verify import _report

MODEL = "support.models.factories:regression"


@pytest.fixture(scope="module")
def plan() -> Plan:
    model, inputs = regression()
    options = CompileOptions(pins={"dp": 2, "zero": 3})
    return find_plan(model, "local-cpux2", inputs, options=options)


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
def test_the_op_of_the_first_divergence_is_named(
    pools: Pools, plan: Plan, node: str, says: str
) -> None:
    text = plan_to_json(plan)
    results = pools.run(
        2, "support.processes.verify:compare_with_a_wrong_op", text, MODEL, *node.split()
    )
    report = _report(plan, results)
    assert not report.passed
    assert says in report.verdict


def test_rows_at_their_experts_are_not_compared() -> None:
    """As many as the routing says, in order of arrival."""
    row = torch.zeros(3, 2)
    for layout, known in ((Shard(0), True), (Experts(), False), (PARTIAL, False)):
        assert _is_known(LocalValue((0, 0), (layout,), row, True), "P") == known
