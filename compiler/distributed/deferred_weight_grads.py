"""Gradients of weights that the backward of a microbatch defers, see
meshfold.codegen.schedule.split_backward."""

import weakref
from collections import Counter
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
        self._tokens: list[tuple[GradientEdge, Tensor]] = []
        self._step: weakref.ref[GatheringStep] | None = None

    def note_step(self, step: "GatheringStep") -> None:
        """Whose backward runs. Weak: the step refers to this."""
        self._step = weakref.ref(step)

    def hold(self, token: Tensor) -> Tensor:
        """A tensor in place of `token`, whose own backward is the last of dW."""
        self._tokens.append((get_gradient_edge(token), token.detach()))
        return token.new_empty(0, requires_grad=True)

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
        """The action dW: all gradients of parameters go to `.grad`, those that are reduced together
        when all of them are there. What a product needed is free behind it."""
        products, self._products = self._products[::-1], []
        groups = self._groups()
        group_of = {number: g for g, numbers in enumerate(groups) for number in numbers}
        reached = [{group_of[n] for n in self._taps_behind(edge)} for edge, _ in products]
        left = Counter(g for of in reached for g in of)
        for g, numbers in enumerate(groups):
            if not left[g]:
                self._hand_over(numbers)
        while products:
            weight, product = products.pop()
            with torch.no_grad():
                gradient = product(None)
            del product
            torch.autograd.backward(weight, gradient)
            del gradient
            for g in sorted(reached.pop()):
                left[g] -= 1
                if not left[g]:
                    self._hand_over(groups[g])
        self._tapped, self._gradients = [], []
        tokens, self._tokens = self._tokens, []
        if tokens:
            torch.autograd.backward([edge for edge, _ in tokens], [g for _, g in tokens])

    def _groups(self) -> list[list[int]]:
        """The numbers of taps whose gradients are handed over together, in the order of the
        backward: those of parameters that were gathered together, others alone."""
        together: dict[object, list[int]] = {}
        for number, edge in enumerate(self._tapped):
            together.setdefault(number if _is_leaf(edge) else edge.node, []).append(number)
        return list(together.values())[::-1]

    def _taps_behind(self, edge: GradientEdge) -> set[int]:
        """The taps that a gradient at this edge comes to."""
        found: set[int] = set()
        seen, left = {edge.node}, [edge.node]
        while left:
            node = left.pop()
            if getattr(node, "deferred", None) is self:
                found.add(node.number)  # type: ignore[attr-defined]
                continue
            behind = {n for n, _ in node.next_functions if n is not None} - seen
            seen |= behind
            left += behind
        return found

    def _hand_over(self, numbers: Sequence[int]) -> None:
        pairs = [(self._tapped[n], g) for n in numbers if (g := self._gradients[n]) is not None]
        for n in numbers:
            self._gradients[n] = None
        if pairs:
            edges, gradients = zip(*pairs, strict=True)
            del pairs
            torch.autograd.backward(edges, gradients)


def _is_leaf(edge: GradientEdge) -> bool:
    """Whether it is a parameter's, or that of the plain tensor in its memory."""
    return edge.node.name() in ("torch::autograd::AccumulateGrad", "AliasBackward0")


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
