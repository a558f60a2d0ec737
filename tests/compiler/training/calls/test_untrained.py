"""An optimizer that trains nothing is told of."""

import copy
import warnings

import pytest
import torch
from torch import nn

import meshfold
from meshfold.training.calls.untrained import NUM_STEPS, Untrained

X = {"x": torch.linspace(-1, 1, 8).reshape(2, 4)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


@pytest.mark.parametrize("steps_by", ["train_step", "forward"])
def test_an_optimizer_of_the_model_before_is_told_of(steps_by: str) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = meshfold.compile(model, "local-cpux1", X)

    def step() -> None:
        if steps_by == "train_step":
            compiled.train_step(X)
        else:
            compiled(**X).backward()
        optimizer.step()
        optimizer.zero_grad()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(NUM_STEPS):
            step()
        copy.deepcopy(compiled).train_step(X)  # has steps of its own
    text = r"^64 steps with gradients .*\(compiled\.parameters\(\)\)"
    with pytest.warns(UserWarning, match=text):
        step()
    for _ in range(2 * NUM_STEPS):  # once
        step()


@pytest.mark.parametrize("writes_data", [False, True])
def test_one_of_its_own_is_not(writes_data: bool) -> None:
    compiled = meshfold.compile(Net(), "local-cpux1", X)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    for _ in range(NUM_STEPS + 2):
        compiled.train_step(X)
        if writes_data:
            for parameter in compiled.parameters():
                parameter.data.mul_(0.9)
        else:
            optimizer.step()
        optimizer.zero_grad()


def test_evaluation_counts_nothing() -> None:
    compiled = meshfold.compile(Net(), "local-cpux1", X)
    with torch.no_grad():
        for _ in range(NUM_STEPS + 2):
            compiled(**X)


def test_frozen_and_empty_parameters_and_others_say_nothing() -> None:
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    cases = [
        ({"a": frozen, "b": nn.Parameter(torch.ones(0))}, {"a": frozen}),
        ({"a": nn.Parameter(torch.ones(2))}, {}),
        ({"a": nn.Parameter(torch.ones(2))}, {"a": torch.ones(2, dtype=torch.float64)}),
    ]
    for before, after in cases:
        untrained = Untrained()
        for _ in range(NUM_STEPS):
            untrained.see(before)
        untrained.see(after)
