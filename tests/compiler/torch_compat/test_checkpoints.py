"""Both forms of torch.utils.checkpoint run as they are told, and as before afterwards."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint

from meshfold.torch_compat.checkpoints import checkpoints_as


class Reentrant:
    @staticmethod
    def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        return function(*args), "plain"


def test_calls_are_plain_inside_and_as_before_afterwards() -> None:
    before = checkpoint.CheckpointFunction
    met: list[Callable[..., Any]] = []
    x = torch.ones(2, requires_grad=True)
    with checkpoints_as(Reentrant, met.append):
        _, how = checkpoint.checkpoint(torch.sin, x, use_reentrant=True)
        y = checkpoint.checkpoint(torch.cos, x, use_reentrant=False)
    assert (how, met) == ("plain", [torch.cos]) and torch.equal(y, x.cos())
    assert checkpoint.CheckpointFunction is before
    checkpoint.checkpoint(torch.cos, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
