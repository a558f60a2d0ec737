"""Plans as documents: what a schema cannot say is checked with its JSON path."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.programs.plans import example_plan

from meshfold.errors import PlanFormatError
from meshfold.plan_file.documents import plan_document, plan_from_document
from meshfold.plan_file.io import plan_from_json, plan_to_json

Edit = Callable[[dict[str, Any]], None]


def test_a_plan_survives_the_document() -> None:
    plan = example_plan()
    assert plan_from_document(plan_document(plan)) == plan


def _set(*path: str | int, to: object) -> Edit:
    def edit(document: dict[str, Any]) -> None:
        at: Any = document
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = to

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_set("time", "step_s", to=9.0), "time.step_s: the file says 9.0, the rest gives 0.34"),
        (_set("memory", "peak_bytes", to=1), "memory.peak_bytes: the file says 1"),
        (_set("strategy", "dp", to=4), "strategy.label: the file says 'dp2 x tp4[+]sp, zero3'"),
        (
            _set("stages", 0, "runs", 1, "region", to="C"),
            r"stages\[0\].runs\[1\].region: no region 'C' in this plan; it has A, B",
        ),
        (_set("mesh", 1, "name", to="dp"), "mesh: axis names must differ, got dp, dp"),
        (
            _set("regions", 1, "ops", 0, to="aten.linear.default  o  S0 -> S0"),
            r"regions\[1\].ops\[0\]: .* names 1 rules, the mesh has 2 axes",
        ),
        (_set("regions", 0, "slots", 1, to="w  S0"), r"regions\[0\].slots\[1\]: 'S0' has 1 types"),
        (
            _set("regions", 1, "parameters", 0, "used", to="I"),
            r"regions\[1\].parameters\[0\].used: 'I' has 1 types, the mesh has 2 axes",
        ),
        (_set("cluster", "groups", to=[]), "cluster.groups: a cluster needs at least one"),
    ],
)
def test_contradictions_are_refused_with_their_path(edit: Edit, message: str) -> None:
    document = json.loads(plan_to_json(example_plan()))
    edit(document)
    with pytest.raises(PlanFormatError, match=message):
        plan_from_json(json.dumps(document))


def test_throughput_stands_in_front_and_must_follow_from_the_rest() -> None:
    plan = example_plan()
    plan = replace(plan, model=replace(plan.model, flops=1e15, compute_dtype="bfloat16"))
    document = json.loads(plan_to_json(plan))
    keys = list(document)
    assert keys.index("throughput") == keys.index("time") + 1
    document["throughput"]["mfu"] = 0.9
    with pytest.raises(PlanFormatError, match=r"throughput.mfu: the file says 0.9, the rest gives"):
        plan_from_json(json.dumps(document))
    document["throughput"] = None
    with pytest.raises(PlanFormatError, match="throughput: the file says None, the rest gives"):
        plan_from_json(json.dumps(document))
    del document["throughput"]  # as in files from before it
    assert plan_from_json(json.dumps(document)) == plan
