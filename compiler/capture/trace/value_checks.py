"""Truths and numbers that a model asks a tensor for while it is traced, on tensors without values.

What an assertion asks for (meshfold.capture.trace.assertions) is answered as it is for every batch
that trains, and kept as a Check. Anything else is refused with its line: a graph cannot hold it.

    bool(x)     answered if it decides an assertion
    x.item()    the same; else a Number (meshfold.capture.known_values.numbers)
"""

import inspect
import operator
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshfold.capture.known_values.empty_rows import EmptyRows
from meshfold.capture.known_values.known_tensors import KnownTensors
from meshfold.capture.known_values.numbers import Number, number_of, refuse_numbers
from meshfold.capture.known_values.refusals import (
    function_name,
    refused_branch,
    refused_number,
)
from meshfold.capture.library_modules.functions import in_ops
from meshfold.capture.trace.assertions import Assertion, Kind, Sources, is_library_check
from meshfold.capture.trace.selections import Selections, ctc_loss
from meshfold.errors import CaptureError
from meshfold.ops.value_checks import checked
from meshfold.torch_compat.source_lines import (
    is_own_file,
    is_user_file,
    user_line,
    validates_arguments,
)

_KINDS: Mapping[Kind, str] = {
    "check": "a check of values",
    "warning": "a warning",
    "shortcut": "a way around a mask that says nothing",
}


@dataclass(frozen=True)
class Check:
    """`condition`, a tensor of one bool, is `assertion.holds`."""

    assertion: Assertion
    condition: torch.Tensor


class ValueChecks:
    """One trace of a model: what was answered. runs: whether assertions are to be run."""

    def __init__(self, *, runs: bool = False) -> None:
        self.runs = runs
        self.found: list[Check] = []
        self.numbers: weakref.WeakSet[Number] = weakref.WeakSet()
        self.lines = ""
        """Of those that the traced call kept."""
        self.sources = Sources()

    def notes(self) -> tuple[str, ...]:
        """A line for every assertion, and one for numbers that are kept."""
        lines = [
            f"{_KINDS[c.assertion.kind]} is "
            f"{'run in every step' if self._is_run(c) else 'left out'} ({c.assertion.note})"
            for c in self.found
        ]
        if self.lines:
            lines.append(f"numbers of tensors that forward keeps are not computed ({self.lines})")
        return tuple(dict.fromkeys(lines))

    def kept(self, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the model returns, the first of it checked by the assertions that are to be run."""
        kept = dict(outputs)
        name = next(iter(kept))
        for check in filter(self._is_run, self.found):
            holds, note = check.assertion.holds, check.assertion.note
            kept[name] = checked(kept[name], check.condition, holds, note)
        return kept

    def assume(self, condition: torch.Tensor, text: str) -> None:
        """Keep a check, which every step runs. text: what the condition says."""
        assertion = Assertion(_line(), text, True, is_always_run=True)
        self.found.append(Check(assertion, condition))

    def keep(self, condition: torch.Tensor, text: str) -> None:
        """Keep a check of torch's, of which every good batch is True."""
        self.found.append(Check(Assertion(_line(), text, True), condition))

    def _is_run(self, check: Check) -> bool:
        if check.assertion.is_always_run:
            return True
        return self.runs and check.assertion.kind == "check"

    def answer(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a function of torch that gives a truth or a number gives here; NotImplemented for
        another function. Raises CaptureError where no assertion asks."""
        if func in _ASSERTS:
            if (asserted := self._asked()) is not None:
                self._keep(asserted, args[0])
            return None
        if func is torch.Tensor.item:
            return self._item(args[0])
        if func is torch.Tensor.__format__ and args[0].ndim == 0:
            return format(self.number(args[0]), args[1])
        if func in _NUMBERS:
            return _NUMBERS[func](self.number(args[0], func))
        if func not in _TRUTHS:
            return NotImplemented
        assertion = self._asked()
        if assertion is None and _asks_for_a_hint():
            return False
        if assertion is None:
            raise refused_branch(function_name(func), _line())
        return self._keep(assertion, _TRUTHS[func](*args, **kwargs))

    def compared(self, condition: torch.Tensor) -> bool:
        """The truth of a comparison of a Number."""
        assertion = self._asked()
        if assertion is None:
            raise refused_branch("Tensor.item", _line())
        return self._keep(assertion, condition)

    def tested(self, number: "Number") -> float:
        """A float for math.isnan(x.item()) and its like, which answers as the assertion wants."""
        assertion = self._asked()
        if assertion is None or _FLOAT_TESTS.get(assertion.called) != assertion.holds:
            raise number.refused()
        name = assertion.called
        self._keep(assertion, getattr(torch, name)(number.tensor))
        return 0.0

    def number(self, tensor: torch.Tensor, func: Any = torch.Tensor.item) -> Number:
        """What stands for the number that a function gives of a tensor."""
        return number_of(tensor, self, function_name(func), _line())

    def noted(self, number: Number) -> Number:
        self.numbers.add(number)
        return number

    def kept_numbers(self) -> str:
        """The lines of numbers that have outlived forward, which may read them next time."""
        self.lines = ", ".join(sorted({number.source for number in self.numbers}))
        return self.lines

    def _item(self, tensor: torch.Tensor) -> Any:
        assertion = self._asked()
        if assertion is None:
            return self.number(tensor)
        self._keep(assertion, tensor)
        if tensor.dtype == torch.bool:
            return assertion.holds
        return float(assertion.holds) if tensor.is_floating_point() else int(assertion.holds)

    def _keep(self, assertion: Assertion, condition: torch.Tensor) -> bool:
        if self.runs and not assertion.is_all and assertion.kind == "check":
            raise CaptureError(
                f"{assertion.text} cannot be run in a step, since one of several values decides "
                "it; write a statement for each, or leave checks out (value_checks='drop')",
                op="Tensor.__bool__",
                source=assertion.source,
            )
        self.found.append(Check(assertion, condition))
        return assertion.holds

    def _asked(self) -> Assertion | None:
        """The assertion for whose sake the user's code asks. Other code of torch in between asks
        for reasons of its own."""
        is_check = False
        frames = (frame for frame, _ in traceback.walk_stack(inspect.currentframe()))
        for frame in frames:
            name = frame.f_code.co_filename
            if is_own_file(name) or frame.f_code.co_name in _PASSES_ON:
                continue
            if is_library_check(frame):
                is_check = True
            elif not (is_user_file(name) or validates_arguments(name)):
                return None
            else:
                found = self.sources.assertion(frame, is_check)
                return None if found is None or self._is_caught([frame, *frames]) else found
        return None

    def _is_caught(self, frames: Sequence[FrameType]) -> bool:
        """Whether the model goes on after an exception there. The frames start with the innermost,
        and go beyond the model's."""
        for frame in frames:
            name, function = frame.f_code.co_filename, frame.f_code.co_name
            if is_own_file(name) and function in _RUNS_THE_MODEL:
                return False
            if is_user_file(name) and self.sources.catches(frame):
                return True
        return False


def _asks_for_a_hint() -> bool:
    """Whether torch's transformer asks if a mask is causal. It takes the mask in either case."""
    frames = (frame.f_code for frame, _ in traceback.walk_stack(inspect.currentframe()))
    asking = (c for c in frames if not (is_own_file(c.co_filename) or c.co_name in _PASSES_ON))
    return next(asking).co_name == "_detect_is_causal_mask"


_ASSERTS = (torch._assert, torch._assert_async)
_RUNS_THE_MODEL = frozenset({"export_fake", "plan_calls"})
"""Functions of capture outside of which frames are not the model's."""

_PASSES_ON = frozenset({"handle_torch_function", "wrapped", "__contains__"})
"""Functions of torch between a value and who asks for it."""

_NUMBERS: Mapping[Any, Callable[[Any], Any]] = {
    torch.Tensor.__float__: float,
    torch.Tensor.__int__: operator.index,
    torch.Tensor.__index__: operator.index,
}
"""Functions of torch that give numbers, and how what they give is read: at once."""

_TRUTHS: Mapping[Any, Callable[..., torch.Tensor]] = {
    torch.Tensor.__bool__: lambda x: x,
    torch.is_nonzero: lambda x: x,
    torch.Tensor.is_nonzero: lambda x: x,
    torch.Tensor.__contains__: lambda x, element: (x == element).any(),
    torch.equal: lambda x, other: (x == other).all(),
    torch.Tensor.equal: lambda x, other: (x == other).all(),
    torch.allclose: lambda *args, **kwargs: torch.isclose(*args, **kwargs).all(),
    torch.Tensor.allclose: lambda *args, **kwargs: torch.isclose(*args, **kwargs).all(),
}
"""Functions that give a bool, and the tensor that holds it."""

_FLOAT_TESTS = {"isnan": False, "isinf": False, "isfinite": True}
"""Functions of math, and what they say of 0.0."""


def _line() -> str:
    return user_line(traceback.walk_stack(inspect.currentframe()))


class Answering(TorchFunctionMode):
    """Answers for assertions, writes some losses and what masks select in ops of fixed shape, keeps
    dropout one op, and leaves everything else as it is. known: answers before all of that with
    values that are known; None where every value is to be one of a batch."""

    def __init__(self, checks: ValueChecks, known: KnownTensors | None = None) -> None:
        super().__init__()
        self.checks = checks
        self.known = known
        self.empty_rows = EmptyRows()
        self.selections = Selections(
            checks.number,
            checks.assume,
            lambda func: refused_number(function_name(func), _line()),
        )

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.known is not None:
            answer = self.known.answer(func, args, kwargs)
            if answer is not NotImplemented:
                return answer
            func, args, kwargs = self.known.arguments(func, args, kwargs)
            if (rows := self.empty_rows.mask(func, args, kwargs)) is not None:
                return self._full_mask(rows)
        refuse_numbers((*args, *kwargs.values()))
        answer = self.selections.answer(func, args, kwargs)
        if answer is NotImplemented:
            answer = ctc_loss(func, args, kwargs)
        if answer is NotImplemented:
            answer = in_ops(func, args, kwargs, self.checks.keep)
        if answer is NotImplemented:
            answer = self.checks.answer(func, args, kwargs)
        if answer is NotImplemented:
            answer = func(*args, **kwargs)
            self.selections.see(func, args, kwargs, answer)
            if self.known is not None:
                self.known.see(func, args, kwargs, answer)
                self.empty_rows.see(func, args, kwargs, answer)
        return answer

    def _full_mask(self, rows: torch.Tensor) -> torch.Tensor:
        """The mask of rows that are not all zeros, as it is without any that are."""
        assert self.known is not None
        self.checks.assume(rows.all(), "no sample is all zeros")
        full = torch.ones_like(rows)
        self.known.see(torch.ones_like, (rows,), {}, full)
        return full
