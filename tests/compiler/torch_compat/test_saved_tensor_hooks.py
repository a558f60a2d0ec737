"""saved_tensors_hooks are told of, and entered as ever."""

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from meshfold.torch_compat.saved_tensor_hooks import saved_tensor_hooks_met


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
