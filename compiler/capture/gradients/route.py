"""How gradients inside of forward find their way back through a trace.

Ops are traced as they are called, and most gradients find what they read in such a trace. Where one
does not, the model is traced twice more: to see which composite ops it goes through, counted as
they are called, and then with those, and no others, in parts (meshfold.capture.gradients.parts).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import pairwise
from typing import Any

import torch

from meshfold.capture.gradients.parts import PARTS
from meshfold.torch_compat.traced_parts import (
    AS_IT_IS,
    KeptResults,
    Part,
    in_parts,
    op_number,
    ops_between,
)


class Step(Enum):
    AS_CALLED = 0
    OBSERVED = 1
    IN_PARTS = 2


class NextStepError(Exception):
    """The trace is to be made again, by the next step of its Route."""


class Route:
    """step: of the present trace. calls: of composite ops that are written in parts, by number.
    num_times: how often forward takes gradients, once that is known."""

    def __init__(self) -> None:
        self.step = Step.AS_CALLED
        self.calls: frozenset[int] = frozenset()
        self.num_times = 0
        self._reset()

    @property
    def is_observing(self) -> bool:
        return self.step is Step.OBSERVED

    @property
    def is_in_parts(self) -> bool:
        return self.step is Step.IN_PARTS

    def _reset(self) -> None:
        self._first_ops: list[int] = []
        self._passed: set[int] = set()
        self._num_calls = self._num_times = 0
        self._is_inside = self._is_backward = False
        self._kept: KeptResults | None = None

    @contextmanager
    def traced(self) -> Iterator[None]:
        """The forward of a model while it is traced."""
        self._reset()
        if self.step is Step.AS_CALLED:
            yield
            return
        with in_parts(self._on_call, PARTS) as self._kept:
            yield

    def _on_call(self, part: Part, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not torch.is_grad_enabled() or self._is_last_time:
            return AS_IT_IS
        if not self._is_inside and not self._is_backward:
            number = self._num_calls
            self._num_calls += 1
            if self.step is Step.OBSERVED:
                self._first_ops.append(op_number())
            if number not in self.calls:
                return AS_IT_IS
        was_inside, self._is_inside = self._is_inside, True
        try:
            return part(*args, **kwargs)
        finally:
            self._is_inside = was_inside

    @contextmanager
    def going_back(self, outputs: Any, inputs: Any) -> Iterator[None]:
        """While torch.autograd.grad(outputs, inputs) runs."""
        if self._kept is not None:
            self._kept.tie()
        if self.step is Step.OBSERVED:
            self._first_ops.append(op_number())
            self._passed |= ops_between(_tensors(outputs), _tensors(inputs))
        self._num_calls += 1  # no call, but ops that are no call's
        self._num_times += 1
        self._is_backward = True
        try:
            yield
        finally:
            self._is_backward = False

    @property
    def _is_last_time(self) -> bool:
        """Whether a backward runs that no other goes back through."""
        return self._is_backward and self._num_times == self.num_times

    def go_on(self) -> bool:
        """Whether there is another step, which is taken: where gradients read what the trace does
        not have."""
        if self.step is Step.OBSERVED:
            self.num_times = self._num_times
            self.calls = frozenset(
                number
                for number, (first, end) in enumerate(pairwise([*self._first_ops, op_number()]))
                if any(first <= op < end for op in self._passed)
            )
        if self.step is Step.IN_PARTS:
            return False
        self.step = Step(self.step.value + 1)
        return True


def _tensors(given: Any) -> list[torch.Tensor]:
    """Tensors among outputs or inputs of torch.autograd.grad."""
    found = given if isinstance(given, Sequence) else (given,)
    return [x for x in found if isinstance(x, torch.Tensor)]
