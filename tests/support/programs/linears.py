"""Two linear layers, with something in between that a graph may not hold."""

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import meshfold
from meshfold.capture.pipeline import capture
from meshfold.errors import CaptureError

Middle = Callable[[Any, Tensor], Tensor]
"""(model, h) -> h."""


class Linears(nn.Module):
    """middle is for subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("factor", torch.ones(4))
        self.register_buffer("history", torch.zeros(1, 4))

    def middle(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x))).square().mean()


def with_middle(kind: type[Linears], middle: Middle) -> Linears:
    """A model of this class that calls `middle`."""

    class Given(kind):  # type: ignore[misc,valid-type]
        def middle(self, h: Tensor) -> Tensor:
            return middle(self, h)

    return Given()


def captured_line(model: nn.Module) -> str:
    """The line that refuses a model; empty where it is captured."""
    try:
        capture(model, {"x": torch.randn(8, 4)})
    except CaptureError as error:
        return str(error)
    return ""


def assert_refused(model: nn.Module, text: str) -> None:
    """Holds that the model is refused by a line with `text`, or captured if that is empty."""
    line = captured_line(model)
    if text:
        assert re.search(text, line) and "\n" not in line, line
    else:
        assert line == ""


def assert_trains_alike(model: nn.Module, num_steps: int = 3) -> None:
    """Holds that a compiled copy has the model's losses and weights, step by step."""
    batches = [{"x": torch.randn(8, 4)} for _ in range(num_steps)]
    compiled = meshfold.compile(copy.deepcopy(model), "local-cpux1", batches[0])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, compiled)]
    for batch in batches:
        losses = []
        for one, optimizer in zip((model, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            loss = one(**batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses)
