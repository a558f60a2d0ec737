"""A plan and the model it was made for, or another one."""

import pytest
from support.models.hugging_face import tiny_model

from meshfold.api import find_plan
from meshfold.errors import PlanMismatchError
from meshfold.models.from_argument import BuiltModel
from meshfold.validation.captured import captured_alike, captured_as_planned


def test_another_model_is_captured_alike_but_is_not_the_planned_one() -> None:
    model, inputs = tiny_model("gpt2")
    plan = find_plan(model, "local-cpu", example_inputs=inputs)
    assert captured_as_planned(plan, BuiltModel(model, inputs)).graph.instances
    other = BuiltModel(*tiny_model("gpt2", layers=3))
    assert captured_alike(plan, other).graph.instances
    with pytest.raises(PlanMismatchError):
        captured_as_planned(plan, other)
