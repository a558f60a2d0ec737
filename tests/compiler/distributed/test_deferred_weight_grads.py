"""Gradients of weights that wait for dW: in what order they are handed over, and that all come."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from meshfold.distributed.deferred_weight_grads import DeferredWeightGrads


class _Group(torch.autograd.Function):
    """Parameters that are gathered together, and whose backward is told."""

    @staticmethod
    def forward(ctx: Any, log: list[str], name: str, token: Tensor, *shards: Tensor) -> Any:
        ctx.log, ctx.label = log, name
        return tuple(s.detach().clone() for s in shards)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.log.append(f"reduce {ctx.label}")
        return None, None, torch.empty(0), *gradients


class _Token(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log: list[str], anchor: Tensor) -> Tensor:
        ctx.log = log
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        ctx.log.append("end")
        return None, torch.zeros(1)


def test_groups_go_as_soon_as_the_last_of_their_gradients_is_there() -> None:
    log: list[str] = []
    deferred = DeferredWeightGrads()
    anchor = torch.zeros(1, requires_grad=True)
    shards = {n: [torch.ones(2, requires_grad=True) for _ in range(2)] for n in "ab"}
    leaf = torch.ones(2, requires_grad=True)
    tapped: dict[str, Tensor] = {}
    for name, members in shards.items():
        token = deferred.hold(_Token.apply(log, anchor))  # type: ignore[no-untyped-call]
        group = _Group.apply(log, name, token, *members)  # type: ignore[no-untyped-call]
        tapped |= {f"{name}{k}": deferred.tap(member) for k, member in enumerate(group)}
    tapped["leaf"] = deferred.tap(leaf)
    leaf.register_hook(lambda _: log.append("leaf"))
    # B comes from the last layer to the first, and brings the gradient of a1 itself.
    for name, value in (("b0", 3.0), ("leaf", 7.0), ("b1", 4.0), ("a0", 5.0), ("b0", 30.0)):
        edge = get_gradient_edge(tapped[name] * 2)

        def product(_: Tensor | None, name: str = name, value: float = value) -> Tensor:
            log.append(name)
            return torch.full((2,), value)

        deferred.defer(edge, product)
    (tapped["a1"] * 11).sum().backward()
    assert log == []
    deferred.run()
    # The product of the leaf, and the leaf; a is whole before the second product of b0.
    assert log == ["b0", "leaf", "leaf", "b1", "a0", "reduce a", "b0", "reduce b", "end", "end"]
    found = [s.grad for of in shards.values() for s in of] + [leaf.grad]
    expected = [10.0, 11.0, 66.0, 8.0, 14.0]
    assert [None if g is None else g.tolist() for g in found] == [[x, x] for x in expected]
    deferred.run()  # nothing is left
    assert len(log) == 10


def test_gradients_that_came_with_b_go_before_the_first_product() -> None:
    deferred, weight, other = (
        DeferredWeightGrads(),
        torch.ones(2, requires_grad=True),
        torch.ones(2, requires_grad=True),
    )
    kept, late = deferred.tap(weight), deferred.tap(other)
    seen: list[bool] = []

    def product(_: Tensor | None) -> Tensor:
        seen.append(weight.grad is not None)
        return torch.ones(2)

    deferred.defer(get_gradient_edge(late), product)
    (kept * 3).sum().backward()
    assert weight.grad is None
    deferred.run()
    assert seen == [True] and weight.grad.tolist() == [3.0, 3.0]
    assert other.grad is not None and other.grad.tolist() == [1.0, 1.0]
