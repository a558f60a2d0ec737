"""torch.func without its levels computes what it does with them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func

from meshfold.torch_compat.functional_gradients import (
    GRADIENT_IN_VMAP,
    functional_gradients,
    is_inside_vmap,
)

X = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3)


def cubic(x: Tensor) -> Tensor:
    return (x * x.cumsum(-1) * x.sin()).sum()


@pytest.mark.parametrize(
    "taken",
    [
        func.grad(cubic),
        lambda x: func.grad_and_value(cubic)(x)[1],
        func.grad(lambda x: func.grad(cubic)(x).square().sum()),
        lambda x: func.vjp(lambda x: x.sin() * x, x)[1](x)[0],
        lambda x: func.grad(lambda tensors: cubic(tensors["x"]))({"x": x})["x"],
        lambda x: func.grad(lambda x, y: cubic(x * y), argnums=1)(x, x),
        lambda x: func.grad(lambda y: (x * y).sum())(x),  # not that of what it closes over
        lambda x: func.jacrev(lambda x: x.sin().sum(0))(x),
    ],
)
def test_gradients_are_the_same(taken: Callable[[Tensor], Any]) -> None:
    right = taken(X)
    with functional_gradients():
        assert torch.allclose(taken(X), right, rtol=1e-13)
        through = taken(X.clone().requires_grad_())
    assert through.requires_grad
    assert torch.equal(taken(X), right)


def test_gradients_inside_of_vmap_are_refused() -> None:
    assert not is_inside_vmap()
    with functional_gradients(), pytest.raises(RuntimeError, match=GRADIENT_IN_VMAP):
        func.vmap(func.grad(cubic))(X)
