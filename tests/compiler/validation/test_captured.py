"""A plan and the model it was made for, or another one."""

import math
from dataclasses import replace

import pytest
import torch
from support.models.hugging_face import tiny_model
from torch import Tensor, nn

from meshfold.api import find_plan
from meshfold.capture.pipeline import Captured, capture
from meshfold.errors import PlanMismatchError
from meshfold.models.from_argument import BuiltModel
from meshfold.passes.fold.assemble import fingerprint
from meshfold.passes.graph.without_dropout import exact
from meshfold.validation.captured import captured_alike, captured_as_planned, rounded_alike
from meshfold.validation.float64_mode import float64_everywhere


def test_another_model_is_captured_alike_but_is_not_the_planned_one() -> None:
    model, inputs = tiny_model("gpt2")
    plan = find_plan(model, "local-cpu", example_inputs=inputs)
    assert captured_as_planned(plan, BuiltModel(model, inputs)).graph.instances
    other = BuiltModel(*tiny_model("gpt2", layers=3))
    assert captured_alike(plan, other).graph.instances
    with pytest.raises(PlanMismatchError):
        captured_as_planned(plan, other)


class Scaled(nn.Module):
    """Of numbers that torch computed, and a table of them."""

    def __init__(self, numbers: list[float]) -> None:
        super().__init__()
        self.layer, self.numbers = nn.Linear(4, 4), numbers

    def forward(self, x: Tensor) -> Tensor:
        first, *_ = torch.tensor(self.numbers).tolist()
        return (self.layer(x) * first * torch.tensor(self.numbers)).sum()


def test_captures_are_alike_but_for_rounding() -> None:
    def captured(*numbers: float) -> Captured:
        return capture(Scaled(list(numbers)).double(), {"x": torch.ones(2, 4).double()})

    narrow = captured(0.1, 0.2, 0.3, 0.4)
    with float64_everywhere():
        wide = captured(0.1, 0.2, 0.3, 0.4)
    assert fingerprint(exact(narrow.graph)) != fingerprint(wide.graph)
    exactly = replace(narrow, graph=exact(narrow.graph))
    assert rounded_alike(wide, exactly) and rounded_alike(exactly, wide)
    for others in ((0.1, 0.2, 0.3, 0.5), (0.2, 0.2, 0.3, 0.4), (0.1, 0.2, 0.3, math.nan)):
        with float64_everywhere():
            assert not rounded_alike(captured(*others), exactly)
    assert not rounded_alike(capture(nn.Linear(4, 4), {"input": torch.ones(2, 4)}), exactly)
