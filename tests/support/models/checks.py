"""Checks that models make of tensors. Not in a test file, whose assertions pytest writes anew."""

import contextlib
import math

import torch
from torch import Tensor
from transformers.utils.import_utils import torch_compilable_check

VOCABULARY = 16


def all_at_once(x: Tensor) -> None:
    """Every way to ask, in one module."""
    assert x.max() < VOCABULARY
    assert x.max().item() < VOCABULARY and abs(x.sum().item() + 1) - 1 > -x.max().item()
    if not x.isfinite().all():
        raise ValueError
    if (x == 3).sum().item() or math.isnan(x.sum().item()):
        raise ValueError(f"{x.sum().item()}")
    torch._check(x.max().item() < 3)
    torch._check_tensor_all(x < 3)
    torch._assert((x < 3).all(), "large")
    torch_compilable_check(x < 3, f"tokens: {x.sum().item():.3f}")
    assert torch.equal(x, x) and torch.allclose(x, other=x) and 3.0 not in x


def finite(x: Tensor) -> None:
    if not x.isfinite().all():
        raise ValueError


def bounded(x: Tensor) -> None:
    assert x.max() < 0.9
    if (x.min() < -0.9).item():
        raise ValueError


def small(x: Tensor) -> None:
    if x.max() > 3:
        raise OverflowError


def caught(x: Tensor) -> None:
    try:
        small(x)
    except OverflowError:
        x.mul_(0)


def suppressed(x: Tensor) -> None:
    with contextlib.suppress(OverflowError):
        small(x)


def passed_on(x: Tensor) -> None:
    try:
        small(x)
    except OverflowError as error:
        raise ValueError from error


def either(x: Tensor) -> None:
    assert x.max() < 3 or x.min() > 3
