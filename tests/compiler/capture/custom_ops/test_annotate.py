"""Ops of torch.library that cannot be one op of a plan are refused, with their line."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models.library_ops import in_place, noisy, without_backward, without_fake
from torch import Tensor, nn

from meshfold.capture.pipeline import capture
from meshfold.errors import CaptureError, UnsupportedOpError


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight).sum()


def changed(y: Tensor) -> Tensor:
    y = y.clone()
    in_place(y)
    return y


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            lambda y: without_fake(y),
            "no fake implementation, .*; register one with torch.library.register_fake",
        ),
        (
            lambda y: without_backward(y),
            "has no backward, and a gradient flows through it; register one",
        ),
        (lambda y: noisy(y), "noisy.default draws random numbers, which ranks would not agree on"),
        (changed, "in_place.default changes an argument in place"),
    ],
)
def test_library_ops_that_cannot_be_one_op_are_refused(function: Any, text: str) -> None:
    with pytest.raises((CaptureError, UnsupportedOpError), match=text) as caught:
        capture(Model(function), {"x": torch.randn(4, 4)})
    assert ".py:" in str(caught.value) and "\n" not in str(caught.value)
