"""Arguments by position and by name."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.errors import OptionError
from meshfold.training.calls.call_arguments import CallArguments, named_inputs


class Net(nn.Module):
    def forward(self, x: Tensor, y: Tensor | None = None, scale: float = 1.0) -> Tensor:
        return x


X, Y = torch.zeros(2), torch.ones(2)
CALLED = CallArguments.of(Net(), {"x": X, "y": Y, "weight": Y})


@pytest.mark.parametrize(
    ("positional", "given", "names"),
    [
        ((X, Y), {}, ["x", "y"]),
        ((X,), {"y": Y}, ["x", "y"]),
        ((), {"y": Y, "x": X}, ["y", "x"]),
        ((X, None), {"scale": 1.0}, ["x"]),
        ((X, Y, 2.0), {}, ["x", "y", "scale"]),
        ((X, Y, 1.0, Y), {}, ["x", "y", "weight"]),
    ],
)
def test_arguments_get_their_names(
    positional: tuple[Any, ...], given: dict[str, Any], names: list[str]
) -> None:
    assert [*CALLED.named(positional, given)] == names


@pytest.mark.parametrize(
    ("positional", "given", "message"),
    [
        ((X, Y, 1.0, Y, X), {}, r"Net takes 4 arguments \(x, y, scale, weight\), 5 are given"),
        ((X,), {"x": X}, "Net: argument 'x' is given twice"),
        ((X,), {"labels": Y}, "Net takes no argument 'labels'; it takes x, y, scale, weight"),
    ],
)
def test_wrong_arguments_are_named(
    positional: tuple[Any, ...], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        CALLED.named(positional, given)


class Listed(nn.Module):
    def forward(self, x: Tensor, /, y: Tensor, *more: Tensor, scale: float = 1.0) -> Tensor:
        return x + y * scale + sum(more)


def test_what_goes_to_args_is_numbered() -> None:
    named = named_inputs(Listed(), (X, Y, X, Y))
    assert named == {"x": X, "y": Y, "more_0": X, "more_1": Y}
    called = CallArguments.of(Listed(), named)
    assert called.named((X, Y, X, Y), {"scale": 2.0}) == {**named, "scale": 2.0}
    assert called.named((), named) == named
    with pytest.raises(OptionError, match="takes no argument 'less_0'; it takes x, y"):
        called.named((X, Y), {"less_0": Y})


def test_a_default_that_was_captured_stays() -> None:
    captured = CallArguments.of(Net(), {"x": X, "scale": 1.0})
    assert captured.named((X,), {"scale": 1.0}) == {"x": X, "scale": 1.0}
    assert captured.missing({}) == ["x"] and captured.missing({"x": X}) == []


def test_example_inputs_may_be_a_tuple() -> None:
    assert named_inputs(Net(), (X, Y)) == {"x": X, "y": Y}
    assert named_inputs(Net(), X) == {"x": X}
    assert named_inputs(Net(), {"y": Y}) == {"y": Y}
