"""The op gated_product against its two ops: values, gradients, and what it keeps."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from meshfold.ops.fused.gated_product import ACTIVATIONS, gated_product

WRITTEN_OUT: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_is_the_product_to_the_bit(activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, x = (torch.randn(3, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    cotangent = torch.randn(3, 8, dtype=dtype)
    made, right = gated_product(gate, x, activation), WRITTEN_OUT[activation](gate) * x
    assert torch.equal(made, right)
    pairs = (torch.autograd.grad(y, (gate, x), cotangent) for y in (made, right))
    for found, wanted in zip(*pairs, strict=True):
        assert torch.equal(found, wanted)


def test_it_keeps_its_operands_alone() -> None:
    kept: list[int] = []
    gate, x = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(id(t)), lambda _: None):
        gated_product(gate, x, "silu")
    assert kept == [id(gate), id(x)]


def test_a_constant_has_no_gradient() -> None:
    gate, x = torch.randn(3, 8), torch.randn(3, 8, requires_grad=True)
    gated_product(gate, x, "silu").sum().backward()  # type: ignore[no-untyped-call]
    assert gate.grad is None and x.grad is not None
    torch.testing.assert_close(x.grad, functional.silu(gate))
