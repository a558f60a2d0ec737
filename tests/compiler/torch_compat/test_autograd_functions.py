"""Calls of Functions are met, but for torch's own and those inside of others."""

from typing import Any

import torch
from support.models.functions import Gelu, Quantize
from support.models.library_ops import swish
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode

from meshfold.torch_compat.autograd_functions import (
    functions_met,
    gradients_on_fakes,
    is_of_op,
    outside_of_tracing,
)


class Outer(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Gelu.apply(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Double(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


double = Double.apply


def test_outer_calls_are_met_with_all_their_arguments() -> None:
    before = vars(Function)["apply"]
    met: list[tuple[type[Function], tuple[Any, ...]]] = []

    def on_call(function: type[Function], args: tuple[Any, ...]) -> Any:
        met.append((function, args[1:]))
        return function.apply(*args)

    x = torch.ones(2, requires_grad=True)
    with functions_met(on_call):
        Outer.apply(x)
        Quantize.apply(x)
        Quantize.apply(x, levels=3)
        swish(x, x)
    assert met == [(Outer, ()), (Quantize, ()), (Quantize, (3,))]
    assert vars(Function)["apply"] is before


def test_calls_by_another_name_are_met_too() -> None:
    """`square = Square.apply` is torch's own method, taken before any context."""
    met: list[tuple[str, int]] = []

    def on_call(function: type[torch.autograd.Function], args: tuple[object, ...]) -> object:
        met.append((function.__name__, len(args)))
        return double(double(*args))

    x = torch.ones(2, requires_grad=True)
    with functions_met(on_call):
        y = double(x)
        assert met == [("Double", 1)], "what it calls inside is not met"
    assert y.tolist() == [4.0, 4.0]
    assert double(x).tolist() == [2.0, 2.0] and met == [("Double", 1)]
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.tolist() == [4.0, 4.0]


def test_modes_see_nothing_outside_of_tracing() -> None:
    class Seeing(TorchDispatchMode):  # type: ignore[no-untyped-call]
        seen = 0

        def __torch_dispatch__(self, func: Any, *_: Any, **__: Any) -> Any:
            self.seen += 1
            return torch.ones(2)

    mode = Seeing()  # type: ignore[no-untyped-call]
    with mode:
        with outside_of_tracing():
            assert torch.zeros(2).sum() == 0
        torch.zeros(2)
    assert mode.seen == 1


def test_nodes_of_library_ops_are_told_from_functions() -> None:
    x = torch.ones(2, requires_grad=True)
    ours, theirs = swish(x, x).grad_fn, Gelu.apply(x).grad_fn
    assert ours is not None and is_of_op(ours) and not is_of_op(theirs)


def test_gradients_on_fakes_may_be_none() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    first, second = gradients_on_fakes([x * 2], [x, y])
    assert first is not None and second is None
