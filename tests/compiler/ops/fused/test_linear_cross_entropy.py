"""Cross entropy of chunks of logits against torch's of whole ones: values, gradients, memory."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from meshfold.memory_probe.prober import StorageCounter
from meshfold.ops import vocab_parallel_cross_entropy  # noqa: F401  defines the op
from meshfold.ops.fused import linear_cross_entropy as chunked

REDUCTIONS = ("none", "mean", "sum")


def errors(
    rows: int, classes: int, reduction: int, smoothing: float, *, has_bias: bool, weighs: bool
) -> list[float]:
    """Differences from torch, of the loss and of every gradient."""
    torch.manual_seed(0)
    x = torch.randn(rows, 5, dtype=torch.float64, requires_grad=True)
    matrix = torch.randn(classes, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(classes, dtype=torch.float64, requires_grad=True) if has_bias else None
    weight = torch.rand(classes, dtype=torch.float64) if weighs else None
    target = torch.randint(0, classes, (rows,))
    target[::3] = -100
    leaves = [t for t in (x, matrix, bias) if t is not None]

    def with_gradients(loss: Tensor) -> list[Tensor]:
        seen = torch.arange(1.0, 1.0 + loss.numel(), dtype=torch.float64).reshape(loss.shape)
        return [loss, *torch.autograd.grad(loss, leaves, seen)]

    made = torch.ops.meshfold.linear_cross_entropy(
        x, matrix, target, bias, weight, reduction, -100, smoothing
    )
    logits = functional.linear(x, matrix, bias)
    right = functional.cross_entropy(
        logits, target, weight, None, -100, None, REDUCTIONS[reduction], smoothing
    )
    pairs = zip(with_gradients(made), with_gradients(right), strict=True)
    return [  # where nothing counts the loss is 0 / 0, and gradients are 0
        0.0 if a.isnan().all() and b.isnan().all() else float((a - b).detach().abs().max())
        for a, b in pairs
    ]


@pytest.mark.parametrize(("rows", "classes"), [(1, 3), (7, 12), (40, 33)])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_it_is_torchs(reduction: int, smoothing: float, rows: int, classes: int) -> None:
    for has_bias in (False, True):
        for weighs in (False, True):
            sizes = rows, classes, reduction, smoothing
            found = errors(*sizes, has_bias=has_bias, weighs=weighs)
            assert all(error < 1e-12 for error in found), found


def test_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "CHUNK_NUMEL", 1)
    assert max(errors(7, 12, 1, 0.1, has_bias=True, weighs=True)) < 1e-12


def test_narrow_numbers_have_a_loss_in_float32_and_gradients_in_their_dtype() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 16).bfloat16().requires_grad_()
    matrix = torch.randn(100, 16).bfloat16().requires_grad_()
    target = torch.randint(0, 100, (64,))
    loss = torch.ops.meshfold.linear_cross_entropy(x, matrix, target, is_wide=True)
    right = functional.cross_entropy(functional.linear(x, matrix).float(), target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, right, rtol=1e-6, atol=1e-6)
    found = torch.autograd.grad(loss, (x, matrix))
    wanted = torch.autograd.grad(right, (x, matrix))
    for ours, torchs in zip(found, wanted, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, torchs, rtol=0.02, atol=1e-3)
    narrow = torch.ops.meshfold.linear_cross_entropy(x, matrix, target)
    assert narrow.dtype == torch.bfloat16


def test_logits_are_never_whole() -> None:
    rows, classes = 256, 1024
    x = torch.randn(rows, 8, requires_grad=True)
    matrix = torch.randn(classes, 8, requires_grad=True)
    target = torch.randint(0, classes, (rows,))
    with StorageCounter([x, matrix, target]) as counter:
        torch.ops.meshfold.linear_cross_entropy(x, matrix, target).backward()
    # Two chunks of an eighth, the gradients, a chunk's products, and some numbers a row.
    logits = 4 * rows * classes
    assert counter.peak_bytes < 2 / 8 * logits + 2 * (x.nbytes + matrix.nbytes) + 100 * rows


def test_gradients_that_nobody_wants_are_not_made() -> None:
    x, matrix = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4)
    loss = torch.ops.meshfold.linear_cross_entropy(x, matrix, torch.arange(6))
    (loss * 2).backward()
    assert x.grad is not None and matrix.grad is None


def test_a_target_that_is_no_class_is_refused() -> None:
    x, matrix = torch.randn(1, 4), torch.randn(9, 4)
    with pytest.raises(IndexError, match="class 9 is not one of 9"):
        torch.ops.meshfold.linear_cross_entropy(x, matrix, torch.tensor([9]))
