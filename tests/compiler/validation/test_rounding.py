"""Gradients that are zero but for rounding, and gradients that are as small and are not."""

from typing import Any

import pytest
import torch
from support.models.hard_to_verify import zero_gradients
from support.processes.pool import Pools

from meshfold.api import find_plan
from meshfold.ir.options import CompileOptions
from meshfold.plan_file.io import plan_to_json
from meshfold.validation.report import ROUNDINGS, TOLERANCE, VerifyReport
from meshfold.validation.rounding import MORE_SAMPLES, SAMPLES, rounding_of, state_of
from meshfold.validation.verify import _report

MODEL = "support.models.hard_to_verify:zero_gradients"
COMPARE = "support.processes.verify:compare"


def test_rounding_is_as_large_as_a_gradient_that_cancels_only() -> None:
    model, inputs = zero_gradients()
    model.double()
    inputs = {name: x.double() for name, x in inputs.items()}

    def train(scale: float) -> Any:
        torch.autograd.backward(model(**inputs) * scale)
        gradients = {n: p.grad / scale for n, p in model.named_parameters() if p.grad is not None}
        return gradients, {n: p.detach().clone() for n, p in model.named_parameters()}

    initial = state_of(model)
    found = rounding_of(model, initial, train)
    gradients, _ = train(1.0)
    sizes = {name: x.abs().max().item() for name, x in gradients.items()}
    assert found.gradients["cancelled"] > 0.1 * sizes["cancelled"] > 0
    assert sizes["tiny"] < 1e-18
    for name in ("tiny", "linear.weight"):
        assert ROUNDINGS * found.gradients[name] < TOLERANCE * sizes[name]
        assert 0 < found.parameters[name] < 1e-14


def test_more_samples_meet_a_kink_that_few_do_not() -> None:
    model = torch.nn.Linear(8, 1, bias=False).double()
    torch.nn.init.ones_(model.weight)
    initial = state_of(model)
    starts: list[torch.Tensor] = []

    def train(_: float) -> Any:
        start = model.weight.detach().clone()
        starts.append(start)
        return {"weight": start}, {"weight": (start > kink).double()}

    kink = torch.full((1, 8), 2.0)
    rounding_of(model, initial, train, MORE_SAMPLES)
    kink, most = (torch.stack(s).amax(0) for s in (starts[: SAMPLES + 1], starts))
    assert (kink < most).any()
    assert rounding_of(model, initial, train).parameters["weight"] == 0.0
    assert rounding_of(model, initial, train, MORE_SAMPLES).parameters["weight"] == 1.0


@pytest.mark.multiprocess
@pytest.mark.slow
def test_rounding_is_no_difference_and_a_small_wrong_gradient_is(pools: Pools) -> None:
    model, inputs = zero_gradients()
    plan = find_plan(model, "local-cpux2", inputs, options=CompileOptions(pins={"dp": 2}))
    text = plan_to_json(plan)

    def report(process: str, *arguments: str) -> VerifyReport:
        return _report(plan, pools.run(2, process, text, MODEL, *arguments))

    right = report(COMPARE)
    assert right.passed, right.verdict
    wrong = report(f"{COMPARE}_a_wrong_program", "tiny")
    assert not wrong.passed
    assert "1 of 4 gradients differ, worst tiny by 1.0e-06" in wrong.verdict
