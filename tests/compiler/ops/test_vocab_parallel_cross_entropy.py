"""Cross entropy of narrow logits, in chunks of rows, against torch's of widened ones."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from meshfold.ops import vocab_parallel_cross_entropy as classes

REDUCTIONS = ("none", "mean", "sum")


def both(
    logits: Tensor, target: Tensor, weight: Tensor | None, *others: Any
) -> list[tuple[Tensor, Tensor]]:
    """(loss, gradient of the logits) of the op, and of torch."""
    reduction, ignore_index, smoothing = others
    ours = logits.clone().requires_grad_()
    torchs = logits.to(classes.wide_dtype(logits)).requires_grad_()
    made = torch.ops.meshfold.cross_entropy(ours, target, weight, *others)
    right = functional.cross_entropy(
        torchs, target, weight, None, ignore_index, None, REDUCTIONS[reduction], smoothing
    )
    return [(y, torch.autograd.grad(y.sum(), x)[0]) for y, x in ((made, ours), (right, torchs))]


@pytest.mark.parametrize("chunk_numel", [1, 40, 2**25])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_it_is_torchs(
    monkeypatch: pytest.MonkeyPatch,
    reduction: int,
    is_weighted: bool,
    smoothing: float,
    chunk_numel: int,
) -> None:
    monkeypatch.setattr(classes, "CHUNK_NUMEL", chunk_numel)
    torch.manual_seed(0)
    logits = 5 * torch.randn(7, 12, dtype=torch.float64)
    target = torch.tensor([0, 11, -100, 3, 3, -100, 5])
    weight = torch.rand(12, dtype=torch.float64) if is_weighted else None
    (loss, gradient), (right, wanted) = both(logits, target, weight, reduction, -100, smoothing)
    torch.testing.assert_close(loss, right, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-12)


def test_maps_of_classes() -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(3, 5, 4, dtype=torch.float64), torch.randint(0, 5, (3, 4))
    (loss, gradient), (right, wanted) = both(logits, target, None, 1, -100, 0.0)
    torch.testing.assert_close(loss, right, rtol=0, atol=1e-13)
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-13)


def test_narrow_logits_have_a_loss_in_float32_and_keep_no_wide_copy() -> None:
    torch.manual_seed(0)
    logits = (5 * torch.randn(6, 64)).bfloat16()
    (loss, gradient), (right, wanted) = both(logits, torch.arange(6), None, 1, -100, 0.0)
    assert (loss.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(loss, right, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, wanted.bfloat16(), rtol=1e-2, atol=1e-6)
    kept: list[Tensor] = []
    leaf = logits.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
        torch.ops.meshfold.cross_entropy(leaf, torch.arange(6))
    assert [t.dtype for t in kept if t.dim() == 2] == [torch.bfloat16]


def test_a_class_that_is_none_is_an_error() -> None:
    with pytest.raises(IndexError, match="class 64 is not one of 64"):
        torch.ops.meshfold.cross_entropy(torch.randn(1, 64), torch.tensor([64]))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_no_target_has_no_mean_and_gradients_of_zero(smoothing: float) -> None:
    target = torch.tensor([-100, -100])
    found, right = both(torch.randn(2, 8), target, None, 1, -100, smoothing)
    for loss, gradient in (found, right):
        assert loss.isnan() and not gradient.any()
