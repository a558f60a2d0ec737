"""A wrong capture is named as such, not as a wrong plan."""

import pytest
import torch
from support.models.factories import regression
from support.processes.pool import Pools
from torch import Tensor

from meshfold.api import find_plan
from meshfold.ir.options import CompileOptions
from meshfold.plan_file.io import plan_to_json
from meshfold.validation.captured_alone import capture_difference
from meshfold.validation.verify import _report


@pytest.mark.multiprocess
def test_a_wrong_capture_is_blamed(pools: Pools) -> None:
    model, inputs = regression()
    options = CompileOptions(pins={"dp": 2, "zero": 3})
    plan = find_plan(model, "local-cpux2", inputs, options=options)
    results = pools.run(
        2,
        "support.processes.verify:compare_a_wrong_capture",
        plan_to_json(plan),
        "support.models.factories:regression",
        "up",
    )
    report = _report(plan, results)
    assert not report.passed
    assert "the captured program differs from the model on one process" in report.verdict
    assert "reduction of parameters" not in report.verdict


ONE, ROW = torch.ones((), dtype=torch.float64), torch.ones(2, dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss", "gradient", "says"),
    [
        (ONE, ROW, ""),
        (ONE * (1 + 1e-13), ROW * (1 + 1e-13), ""),
        (ONE * 2, ROW, "differs from the model on one process: the losses are 2.0 and 1.0"),
        (ONE, ROW * 1.5, "differs from the model on one process: the gradient of w by 5.0e-01"),
        (ONE, None, "the gradient of w by 1.0e+00"),
        (ONE * float("nan"), ROW, "the losses are nan and 1.0"),
    ],
)
def test_a_difference_is_one_clause(loss: Tensor, gradient: Tensor | None, says: str) -> None:
    gradients = {"w": gradient, "unused": None}
    found = capture_difference((loss, gradients), (ONE, {"w": ROW, "unused": None}), 1e-10)
    assert says in found and bool(says) == bool(found)
