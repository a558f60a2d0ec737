"""A model that was compiled warns where the compiled model was trained in its place."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import meshfold

X = {"x": torch.linspace(-1, 1, 8).reshape(2, 4)}
LEFT = "these weights of Net are those from before meshfold.compile"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**X).backward()
    optimizer.step()


def said(model: nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert set(model.state_dict()) == {"linear.weight", "linear.bias"}
    assert all(w.filename == __file__ for w in caught)
    return [str(w.message) for w in caught]


def test_it_warns_once_after_training() -> None:
    model = Net()
    compiled = meshfold.compile(model, "local-cpux1", X)
    assert said(model) == []
    compiled.train_step(X)
    assert said(model) == [], "no weight has changed"
    train(compiled)
    assert said(compiled) == []
    (message,) = said(model)
    assert message.startswith(LEFT)
    assert said(model) == []


def test_its_forward_warns_once_after_training() -> None:
    model = Net()
    compiled = meshfold.compile(model, "local-cpux1", X)
    before = model(**X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled.train_step(X)
        model(**X)
        train(compiled)
        compiled(**X)
    with pytest.warns(UserWarning, match=LEFT) as caught:
        assert torch.equal(model(**X), before)
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**X)


def test_a_model_that_is_trained_beside_it_is_no_mistake() -> None:
    model = Net()
    compiled = meshfold.compile(model, "local-cpux1", X)
    train(model)
    train(compiled)
    assert said(model) == []


def test_weights_that_were_taken_back_are_no_mistake() -> None:
    model = Net()
    compiled = meshfold.compile(model, "local-cpux1", X)
    train(compiled)
    model.load_state_dict(compiled.full_state_dict())
    assert said(model) == []


def test_each_compilation_tells_of_its_own() -> None:
    model = Net()
    first = meshfold.compile(model, "local-cpux1", X)
    train(first)
    second = meshfold.compile(model, "local-cpux1", X)
    train(first)
    train(second)
    assert len(said(model)) == 2
    third = meshfold.compile(model, "local-cpux1", X)
    train(third)
    del third
    assert said(model) == []


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_say_nothing_and_need_no_meshfold(how: str) -> None:
    model = Net()
    compiled = meshfold.compile(model, "local-cpux1", X)
    train(compiled)
    pickled = pickle.dumps(model)
    assert b"meshfold" not in pickled
    made = pickle.loads(pickled) if how == "pickle" else copy.deepcopy(model)
    assert said(made) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(made(**X), made.forward(**X))
        assert torch.equal(made(X["x"]), made.forward(**X))
    train(meshfold.compile(made, "local-cpux1", X))


def test_weights_made_in_inference_mode_are_not_counted() -> None:
    with torch.inference_mode():
        model = Net()
    compiled = meshfold.compile(model, "local-cpux1", X)
    train(compiled)
    assert said(model) == []
