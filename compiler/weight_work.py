"""What the backward of a microbatch leaves for later, see meshfold.weight_gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


class WeightWork:
    """What the W of one stage and microbatch has to do. It holds places in autograd's graph, no
    parameters: gathered ones are released in between."""

    def __init__(self) -> None:
        self._left: list[tuple[GradientEdge, Callable[[], Tensor]]] = []
        self._tapped: list[GradientEdge] = []
        self._gradients: list[Tensor | None] = []

    def tap(self, parameter: Tensor) -> Tensor:
        """The same tensor; its gradient waits here."""
        if not parameter.requires_grad:
            return parameter
        self._tapped.append(get_gradient_edge(parameter))
        self._gradients.append(None)
        number = len(self._tapped) - 1
        # Autograd visits what is behind a node even with nothing to bring: behind a tap is nothing.
        anchor = parameter.new_empty(0, requires_grad=True)
        return _Tap.apply(anchor, parameter.detach(), self, number)  # type: ignore[no-any-return, no-untyped-call]

    def leave(self, weight: GradientEdge, gradient: Callable[[], Tensor]) -> None:
        """Make the gradient of a weight later."""
        self._left.append((weight, gradient))

    def arrive(self, number: int, gradient: Tensor) -> None:
        """A gradient at a tap."""
        before = self._gradients[number]
        self._gradients[number] = gradient if before is None else before + gradient

    def gradients(self, places: Sequence[GradientEdge]) -> list[Tensor | None]:
        """What was left, as gradients at `places` of autograd's graph; None for nothing."""
        numbers = {(place.node, place.output_nr): k for k, place in enumerate(places)}
        found: list[Tensor | None] = [None] * len(places)
        for weight, gradient in self._left:
            made, k = gradient(), numbers.get((weight.node, weight.output_nr))
            parts = (
                torch.autograd.grad([weight], places, [made], allow_unused=True)
                if k is None
                else [made if j == k else None for j in range(len(places))]
            )
            for j, part in enumerate(parts):
                before = found[j]
                found[j] = part if before is None else before if part is None else before + part
        self._left.clear()
        return found

    def run(self) -> None:
        """W: all gradients of parameters go to `.grad`."""
        for weight, gradient in self._left:
            torch.autograd.backward(weight, gradient())
        self._left.clear()
        pairs = zip(self._tapped, self._gradients, strict=True)
        found = [(parameter, g) for parameter, g in pairs if g is not None]
        if found:
            torch.autograd.backward([p for p, _ in found], [g for _, g in found])
        self._tapped.clear()
        self._gradients.clear()


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, parameter: Tensor, work: WeightWork, number: int
    ) -> Tensor:
        ctx.work, ctx.number = work, number
        ctx.set_materialize_grads(False)
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None, None, None]:
        if gradient is not None:
            ctx.work.arrive(ctx.number, gradient)
        return None, None, None, None
