"""Edges keep what is behind them; a call at the end of the backward that runs; hooks of saved
tensors are told of, and entered as ever."""

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from meshfold.torch_compat import autograd_engine
from meshfold.torch_compat.autograd_engine import (
    at_end_of_backward,
    edge_of,
    saved_tensor_hooks_met,
)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


@pytest.mark.parametrize("keeps", ["as this torch does", "as torch 2.11 does"])
def test_an_edge_keeps_what_is_behind_it(keeps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if keeps == "as torch 2.11 does":
        monkeypatch.setattr(autograd_engine, "_keeps_functions", lambda: False)
    x = torch.ones(2, requires_grad=True)
    inner = x.sin()
    edges = [edge_of(Twice.apply(inner)), edge_of(inner.exp())]
    assert all(edge.ownership_token is None for edge in edges[1:])
    gradients = [torch.full((2,), 3.0), torch.full((2,), 5.0)]
    (found,) = torch.autograd.grad(edges, [edge_of(inner)], gradients)
    assert torch.equal(found, 6 + 5 * inner.exp())


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
