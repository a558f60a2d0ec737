"""The op rms_norm against the norm written out: values, gradients, and what it keeps."""

import pytest
import torch
from torch import Tensor

from meshfold.ops.fused.rms_norm import rms_norm


def written_out(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    wide = x.to(torch.float64)
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return y if weight is None else weight * y


@pytest.mark.parametrize("is_weighted", [True, False])
def test_in_float64_it_is_the_norm_written_out(is_weighted: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True) if is_weighted else None
    leaves = [x] if weight is None else [x, weight]
    cotangent = torch.randn(2, 3, 8, dtype=torch.float64)
    made, right = rms_norm(x, [8], weight, 1e-6), written_out(x, weight, 1e-6)
    torch.testing.assert_close(made, right, rtol=0, atol=1e-14)
    pairs = (torch.autograd.grad(y, leaves, cotangent) for y in (made, right))
    for found, wanted in zip(*pairs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


def test_narrow_numbers_are_rounded_once() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(64).bfloat16()
    made = rms_norm(x, [64], weight, 1e-6)
    assert made.dtype == torch.bfloat16
    right = written_out(x, weight, 1e-6)
    # Half of the last of 8 bits.
    assert ((made.double() - right).abs() <= right.abs() / 2**8 * 1.001).all()


def test_it_keeps_its_input_and_a_number_a_row() -> None:
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x = torch.randn(5, 64).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        rms_norm(x, [64], torch.ones(64), 1e-6)
    sizes = [(tuple(t.shape), t.dtype) for t in kept]
    assert sizes == [((5, 64), x.dtype), ((64,), torch.float32), ((5, 1), torch.float32)]


def test_only_gradients_that_are_wanted_are_computed() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8, requires_grad=True)
    rms_norm(x, [8], weight, 1e-6).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None and x.grad is None
