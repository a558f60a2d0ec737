"""A call at the end of the backward that runs; saved_tensors_hooks are told of, and entered as
ever."""

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from meshfold.torch_compat.autograd_engine import at_end_of_backward, saved_tensor_hooks_met


def test_it_comes_when_all_gradients_are_there() -> None:
    first, last = (torch.ones(2, requires_grad=True) for _ in range(2))
    seen: list[bool] = []

    def notice(_: torch.Tensor) -> None:
        at_end_of_backward(lambda: seen.append(first.grad is not None and last.grad is not None))

    last.register_post_accumulate_grad_hook(notice)
    (first.sin() * last).sum().backward()
    assert seen == [True]


def test_hooks_are_met_and_in_force() -> None:
    met: list[Any] = []
    x = torch.ones(3, requires_grad=True)

    def pack(saved: torch.Tensor) -> torch.Tensor:
        return saved * 2

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        return saved

    with (
        saved_tensor_hooks_met(lambda *hooks: met.append(hooks)),
        saved_tensors_hooks(pack, unpack),
    ):
        y = (x * x).sum()
    y.backward()
    assert met == [(pack, unpack)]
    assert x.grad is not None and x.grad.tolist() == [4.0] * 3
    with saved_tensors_hooks(pack, unpack):
        (x * x).sum()
    assert len(met) == 1
