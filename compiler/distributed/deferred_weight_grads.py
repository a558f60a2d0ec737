"""Gradients of weights that the backward of a microbatch defers, see
meshfold.codegen.schedule.split_backward."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

Product = Callable[[Tensor | None], Tensor]
"""Computes a gradient: a new tensor, or added to one that is given up."""


class GatheringStep(Protocol):
    """What is asked of a TrainingStep (meshfold.zero.step)."""

    @property
    def uses(self) -> Sequence[object]: ...
    def release(self, instance: int) -> None: ...


class DeferredWeightGrads:
    """The weight gradients (dW) of one stage and microbatch. It refers to edges of autograd's
    graph, not to parameters: gathered ones are released in between."""

    def __init__(self) -> None:
        self._products: list[tuple[GradientEdge, Product]] = []
        self._tapped: list[GradientEdge] = []
        self._gradients: list[Tensor | None] = []
        self._step: weakref.ref[GatheringStep] | None = None

    def note_step(self, step: "GatheringStep") -> None:
        """Whose backward runs. Weak: the step refers to this."""
        self._step = weakref.ref(step)

    def end_backward(self) -> None:
        """All but what is put off is done: no product here reads a gathered parameter."""
        step = self._step() if self._step is not None else None
        if step is not None:
            for instance in range(len(step.uses)):
                step.release(instance)

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

    def defer(self, weight: GradientEdge, product: Product) -> None:
        """Compute the gradient of a weight later."""
        self._products.append((weight, product))

    def arrive(self, number: int, gradient: Tensor) -> None:
        """A gradient at a tap."""
        before = self._gradients[number]
        self._gradients[number] = gradient if before is None else before + gradient

    def gradients(
        self, edges: Sequence[GradientEdge], before: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The deferred gradients, as gradients at `edges` of autograd's graph, added to those of
        `before`, which are given up; None for no gradient. Products are added in place."""
        numbers = {(edge.node, edge.output_nr): k for k, edge in enumerate(edges)}
        found = list(before)
        for weight, product in self._products:
            k = numbers.get((weight.node, weight.output_nr))
            with torch.no_grad():
                gradient = product(None if k is None else found[k])
            if k is not None:
                found[k] = gradient
                continue
            shares = torch.autograd.grad([weight], edges, [gradient], allow_unused=True)
            for j, share in enumerate(shares):
                if share is not None:
                    known = found[j]
                    found[j] = share if known is None else known.add_(share)
        self._products.clear()
        return found

    def run(self) -> None:
        """The action dW: all gradients of parameters go to `.grad`. What a product needed is free
        behind it."""
        products, self._products = self._products[::-1], []
        while products:
            weight, product = products.pop()
            with torch.no_grad():
                gradient = product(None)
            del product
            torch.autograd.backward(weight, gradient)
        pairs = zip(self._tapped, self._gradients, strict=True)
        found = [(parameter, g) for parameter, g in pairs if g is not None]
        self._tapped, self._gradients = [], []
        # What is gathered together needs all of its gradients at once; others go one by one.
        together = [(e, g) for e, g in found if not _is_leaf(e)]
        alone = [(e, g) for e, g in found if _is_leaf(e)]
        del found
        while alone:
            parameter, gradient = alone.pop()
            torch.autograd.backward(parameter, gradient)
        if together:
            torch.autograd.backward([p for p, _ in together], [g for _, g in together])


def _is_leaf(edge: GradientEdge) -> bool:
    return edge.node.name() == "torch::autograd::AccumulateGrad"


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, parameter: Tensor, deferred: DeferredWeightGrads, number: int
    ) -> Tensor:
        ctx.deferred, ctx.number = deferred, number
        ctx.set_materialize_grads(False)
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None, None, None]:
        if gradient is not None:
            ctx.deferred.arrive(ctx.number, gradient)
        return None, None, None, None
