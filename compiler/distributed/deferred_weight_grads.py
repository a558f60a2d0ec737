"""What the backward of a microbatch leaves for later, see meshfold.codegen.schedule.split_backward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


class WeightWork:
    """What the W of one stage and microbatch has to do. It holds places in autograd's graph, no
    parameters: gathered ones are released in between."""

    def __init__(self) -> None:
        self._left: list[tuple[GradientEdge, Callable[[Tensor | None], Tensor]]] = []
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

    def leave(self, weight: GradientEdge, gradient: Callable[[Tensor | None], Tensor]) -> None:
        """Make the gradient of a weight later: a new tensor, or added to one that is given up."""
        self._left.append((weight, gradient))

    def arrive(self, number: int, gradient: Tensor) -> None:
        """A gradient at a tap."""
        before = self._gradients[number]
        self._gradients[number] = gradient if before is None else before + gradient

    def gradients(
        self, places: Sequence[GradientEdge], before: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """What was left, as gradients at `places` of autograd's graph, and those of `before`,
        which are given up; None for nothing. Products are added in place."""
        numbers = {(place.node, place.output_nr): k for k, place in enumerate(places)}
        found = list(before)
        for weight, gradient in self._left:
            k = numbers.get((weight.node, weight.output_nr))
            with torch.no_grad():
                made = gradient(None if k is None else found[k])
            if k is not None:
                found[k] = made
                continue
            parts = torch.autograd.grad([weight], places, [made], allow_unused=True)
            for j, part in enumerate(parts):
                if part is not None:
                    known = found[j]
                    found[j] = part if known is None else known.add_(part)
        self._left.clear()
        return found

    def run(self) -> None:
        """W: all gradients of parameters go to `.grad`."""
        for weight, gradient in self._left:
            with torch.no_grad():
                made = gradient(None)
            torch.autograd.backward(weight, made)
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
