"""Functions that cannot be one op of a graph are refused, with their line."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from meshfold.capture.pipeline import capture
from meshfold.capture.trace.functions import FunctionCalls
from meshfold.errors import CaptureError
from meshfold.torch_compat.fake_tensors import fake_mode


class Model(nn.Module):
    """A parameter on the batch, and a function of both."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight)


class Noisy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class InPlace(Noisy):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


in_place = InPlace.apply


class Launching(Noisy):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.data_ptr()
        return x.clone() if x.sum().item() > 0 else -x


class Object(Noisy):
    @staticmethod
    def forward(ctx: Any, x: Tensor, config: object = None) -> Tensor:
        return x.clone()


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda y: Noisy.apply(y).sum(), "Noisy is .* that draws random numbers"),
        (lambda y: InPlace.apply(y + 1).sum(), "InPlace is .* that changes an argument in place"),
        (lambda y: Launching.apply(y).sum(), "Launching is .* cannot run on tensors without"),
        (lambda y: Object.apply(y, object()).sum(), "Object is called with a object"),
    ],
)
def test_what_cannot_be_one_op_is_refused_with_its_line(loss: Any, text: str) -> None:
    with pytest.raises(CaptureError, match=text) as caught:
        capture(Model(loss), {"x": torch.ones(4, 4)})
    assert "test_functions.py:" in str(caught.value) and "\n" not in str(caught.value)


class Frozen(Function):
    """Gives its second argument no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        return gradient * scale, None


def test_an_argument_whose_gradient_is_none_is_cut_off() -> None:
    model = Model(lambda y: Frozen.apply(y, model.weight).sum())
    (region,) = capture(model, {"x": torch.ones(4, 4)}).graph.regions
    assert [op.target.rpartition(":")[2] for op in region.graph.ops] == [
        "aten.mul.Tensor",
        "aten.detach.default",
        "Frozen",
        "aten.sum.default",
    ]


def test_equal_calls_are_found_once() -> None:
    calls = FunctionCalls()
    with fake_mode():
        x = torch.ones(4, 4, requires_grad=True)
        for scale in (x, x.detach(), x):
            calls.on_call(Frozen, (x, scale))
    assert len(calls.calls) == 2
    assert calls.calls[0].untrained == {1} and calls.calls[0].trained == (True,)


def test_a_refused_call_is_refused_again() -> None:
    """Another trace of the same model asks once more, with the same record of calls."""
    calls = FunctionCalls()
    x = torch.ones(2)
    for _ in range(2):
        with pytest.raises(CaptureError, match="changes an argument in place"):
            calls.on_call(InPlace, (x,))
    with pytest.raises(CaptureError, match=r"InPlace is .* changes an argument in place"):
        capture(Model(lambda y: in_place(y + 1).sum()), {"x": torch.ones(4, 4)})
