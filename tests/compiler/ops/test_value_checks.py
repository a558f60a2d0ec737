"""The op check: itself where the condition holds, an error where not, gradients unchanged."""

import pytest
import torch

from meshfold.errors import ValueCheckError
from meshfold.ops.value_checks import checked


def test_a_tensor_goes_on_where_the_condition_holds() -> None:
    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: checked(x, torch.tensor(False), False, "t"), x)
    assert torch.equal(checked(x, torch.tensor([1]), True, "t"), x)


def test_a_condition_that_does_not_hold_ends_the_step() -> None:
    with pytest.raises(ValueCheckError, match=r"a check of values fails \(a.py:1: assert x\)"):
        checked(torch.zeros(()), torch.tensor(False), True, "a.py:1: assert x")


def test_on_fake_tensors_nothing_is_checked() -> None:
    x = torch.empty(2, device="meta")
    assert checked(x, torch.empty((), device="meta", dtype=torch.bool), True, "t").shape == (2,)
