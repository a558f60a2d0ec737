"""Probes: ranks against one, linear backward passes, random draws, large sizes made small."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models.functions import Clip, Gelu, RmsNorm
from torch import Tensor
from torch.autograd import Function

from meshfold.capture.custom_ops.probes import (
    Call,
    CannotRunError,
    Labels,
    difference,
    draws,
    is_linear,
)
from meshfold.ir.op_graph import Ref, Value
from meshfold.ops.functions import FunctionOp


def call(
    function: Callable[..., Any], *shapes: tuple[int, ...], rest: tuple[Any, ...] = ()
) -> Call:
    """A call on tensors of these shapes that want gradients; the result is as the first."""
    if isinstance(function, type) and issubclass(function, Function):
        function = FunctionOp(function, function.__name__)
    values = tuple(Value(shape, "float32", True) for shape in shapes)
    args = (*(Ref(k) for k in range(len(shapes))), *rest)
    return Call(function, args, (), values, values[:1])


ROWS = Labels((("n", ""),), (("n", ""),))


def test_shards_are_told_from_what_mixes() -> None:
    norm = call(RmsNorm, (4, 6), (6,), rest=(1e-6,))
    by_rows = Labels((("n", "k"), ("k",)), (("n", "k"),))
    assert difference(norm, by_rows, "n") == ""
    assert difference(norm, by_rows, "k") == "result 0 is another where ranks share k"
    assert difference(call(lambda x: x - x.mean(0), (4, 6)), ROWS, "n").startswith("result 0")


def test_a_backward_that_mixes_shows_where_the_forward_does_not() -> None:
    class Mixing(Gelu):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient - gradient.mean(0)

    found = difference(call(Mixing, (4, 6)), ROWS, "n")
    assert found == "the gradient of operand 0 is another where ranks share n"


def test_blocks_are_shared_by_halves_but_not_row_by_row() -> None:
    """A user may claim what holds for even shares; it is not found by itself."""

    def pairs(x: Tensor) -> Tensor:
        return x - x.reshape(-1, 2, x.shape[1]).mean(1).repeat_interleave(2, 0)

    assert difference(call(pairs, (8, 6)), ROWS, "n", is_claimed=True) == ""
    assert difference(call(pairs, (8, 6)), ROWS, "n").startswith("a shard of n raises")


def test_large_sizes_are_made_small() -> None:
    shapes: list[tuple[int, ...]] = []

    def seen(x: Tensor, weight: Tensor) -> Tensor:
        shapes.append((*x.shape, *weight.shape))
        return x * weight

    labels = Labels((("n", ""), ("",)), (("n", ""),))
    assert difference(call(seen, (4096, 8192), (8192,)), labels, "n") == ""
    assert max(max(shape) for shape in shapes) <= 16


def test_an_op_that_knows_its_size_is_tried_with_few_rows() -> None:
    def fixed(x: Tensor) -> Tensor:
        return x.reshape(-1, 8, 1024).relu().reshape(-1, 8192)

    assert difference(call(fixed, (4096, 8192)), ROWS, "n") == ""


def test_what_raises_everywhere_cannot_be_tried() -> None:
    def failing(x: Tensor) -> Tensor:
        raise RuntimeError("needs a device")

    with pytest.raises(CannotRunError, match="RuntimeError: .*needs a device"):
        difference(call(failing, (4, 6)), ROWS, "n")
    assert not is_linear(call(failing, (4, 6))) and not draws(call(failing, (4, 6)))


def test_linear_backward_passes() -> None:
    assert is_linear(call(Gelu, (4, 6)))
    assert not is_linear(call(Clip, (4, 6)))


def test_draws_show() -> None:
    assert draws(call(lambda x: x + torch.rand_like(x), (4, 6)))
    assert not draws(call(Gelu, (4, 6)))
