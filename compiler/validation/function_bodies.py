"""Modes that see inside of torch's own Python functions.

torch calls a TorchFunctionMode for the outermost function only: what F.multi_head_attention_forward
calls in turn, its dropout say, passes by. A SeeingMode runs the body of such a function instead, in
which every call comes to the mode again.
"""

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

from torch.nn import functional
from torch.overrides import (
    TorchFunctionMode,
    has_torch_function,
    has_torch_function_unary,
    has_torch_function_variadic,
)

_QUESTIONS = (has_torch_function, has_torch_function_unary, has_torch_function_variadic)
"""How a function asks whether a mode wants to see it."""


class SeeingMode(TorchFunctionMode):
    """A mode that also sees the calls within functions of torch.nn.functional."""

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """func(*args, **kwargs); of a function with such calls its body, under this mode."""
        body = _body_of(func)
        if body is None:
            return func(*args, **kwargs)
        with self:
            return body(*args, **kwargs)


def _body_of(func: Any) -> Callable[..., Any] | None:
    """The function, but it asks for no mode; None if it is none of torch.nn.functional."""
    if not isinstance(func, FunctionType) or func.__globals__ is not vars(functional):
        return None
    unasked = {
        name: _never
        for name, value in func.__globals__.items()
        if any(value is q for q in _QUESTIONS)
    }
    if unasked.keys().isdisjoint(func.__code__.co_names):
        return None
    body = FunctionType(
        func.__code__,
        {**func.__globals__, **unasked},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _never(*_: Any) -> bool:
    return False
