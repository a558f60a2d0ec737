"""Subclasses of torch.Tensor for plain tensors."""

import torch
from torch import Tensor
from torch.optim import optimizer

from meshfold.torch_compat.tensor_subclasses import (
    let_optimizers_fuse,
    on_plain_tensors,
    plain_tensor,
)


class Other(Tensor):
    pass


def test_functions_give_plain_tensors_inside() -> None:
    x = torch.ones(2).as_subclass(Other)
    assert type(x + 1) is Other
    with on_plain_tensors():
        assert type(x + 1) is Tensor
    assert type(x + 1) is Other


def test_a_plain_tensor_is_in_the_same_memory_and_a_gradient_flows_through_it() -> None:
    x = torch.ones(2).as_subclass(Other).requires_grad_()
    plain = plain_tensor(x)
    assert type(plain) is Tensor and plain.data_ptr() == x.data_ptr()
    (plain * 3).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]
    parameter = torch.nn.Parameter(torch.ones(1))
    assert plain_tensor(parameter) is parameter


def test_a_subclass_is_told_to_optimizers_once() -> None:
    before = [*optimizer._foreach_supported_types]
    try:
        let_optimizers_fuse(Other)
        let_optimizers_fuse(Other)
        assert optimizer._foreach_supported_types == [*before, Other]
    finally:
        optimizer._foreach_supported_types[:] = before
        torch.utils._foreach_utils._foreach_supported_types.remove(Other)
