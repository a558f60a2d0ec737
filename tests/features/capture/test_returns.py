"""Returns as people write them: losses, outputs and logits of several ranks are those of one
process, whatever the model returns them in, in one pass and in pipelines."""

from typing import Any

import pytest
from support.models.returns import decoder
from support.processes.pool import Pools

import meshfold
from meshfold.errors import CaptureError, OptionError, PlanMismatchError
from meshfold.ir.options import CompileOptions

EXACT = 1e-12
ALL: dict[str, Any] = {"outputs": "all"}
SHARDED = {**ALL, "sharded_outputs": True}
SUMMED = {**ALL, "loss": "losses.cls + losses.size"}
LONG_S = 300.0

Case = tuple[str, dict[str, Any], dict[str, Any]]
QUICK: list[Case] = [("tuple", {"dp": 2, "zero": 3}, ALL)]
SLOW: list[Case] = [
    ("record", {"tp": 2, "sp": 1}, ALL),
    ("dict", {"tp": 2, "sp": 0}, {"outputs": ("logits", "states")}),
    ("output", {"tp": 2, "sp": 1}, {**ALL, "mode": "scheduled"}),
    ("losses", {"dp": 2, "zero": 3}, SUMMED),
    ("record", {"tp": 2, "sp": 0}, SHARDED),
    ("loss first", {"dp": 2, "microbatches": 2}, ALL),
    ("losses", {"pp": 2, "microbatches": 2}, SUMMED),
]
FOUR: list[Case] = [
    ("output", {"dp": 2, "tp": 2, "zero": 3, "sp": 1}, ALL),
    ("tuple", {"dp": 2, "pp": 2, "microbatches": 2}, ALL),
]


def check(pools: Pools, num_processes: int, cases: list[Case]) -> None:
    function = "support.processes.returns:largest_errors"
    for found in pools.run(num_processes, function, cases, timeout_s=LONG_S):
        for case, errors in zip(cases, found, strict=True):
            assert max(errors.values()) <= EXACT, (case, errors)


@pytest.mark.multiprocess
def test_steps_and_logits_of_two_ranks_equal_those_of_one(pools: Pools) -> None:
    check(pools, 2, QUICK)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_every_form_under_every_kind_of_plan(pools: Pools, case: Case) -> None:
    check(pools, 2, [case])


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("case", FOUR, ids=str)
def test_forms_on_four_ranks(pools: Pools, case: Case) -> None:
    check(pools, 4, [case])


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("pins", [{"dp": 2, "zero": 3}, {"tp": 2}], ids=str)
def test_a_criterion_outside_and_accuracy_in_eval_mode(pools: Pools, pins: dict[str, int]) -> None:
    for errors in pools.run(2, "support.processes.returns:criterion_errors", pins):
        assert max(errors.values()) <= EXACT, errors


def test_several_losses_without_a_name_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"several scalars .* \(losses.cls, losses.size\); name"):
        meshfold.find_plan(*decoder("losses")[:1], "local-cpux2", decoder("losses")[1])


def test_shards_of_microbatches_are_refused() -> None:
    model, batch = decoder()
    options = CompileOptions(pins={"microbatches": 2}, **SHARDED)
    with pytest.raises(OptionError, match="sharded_outputs: stages and microbatches gather"):
        meshfold.find_plan(model, "local-cpux1", batch, options=options)


def test_a_plan_says_what_its_steps_return() -> None:
    model, batch = decoder("losses")
    options = CompileOptions(**SUMMED)
    plan = meshfold.find_plan(model, "local-cpux2", batch, options=options)
    assert plan.model.loss == "losses.cls + losses.size"
    assert plan.model.outputs == (plan.model.loss, "logits", "losses.cls", "losses.size")
    made = meshfold.compile(model, "local-cpux2", batch, plan=plan)
    assert made.plan.model == plan.model
    other = CompileOptions(loss="losses.cls")
    with pytest.raises(PlanMismatchError, match=r"for loss 'losses.cls \+ losses.size' and outp"):
        meshfold.compile(model, "local-cpux2", batch, plan=plan, options=other)
