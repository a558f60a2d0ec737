"""Calls of custom autograd.Functions, met while a model runs. The one file that stands in for
torch.autograd.Function.apply, and that steps out of what torch traces with."""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import BuiltinMethodType, ModuleType
from typing import Any

import torch
from torch._library import autograd as library_autograd
from torch._library import custom_ops as library_ops
from torch.autograd import Function
from torch.utils import _python_dispatch

from meshfold.errors import moved

OnCall = Callable[[type[Function], tuple[Any, ...]], Any]

_OWN = ("torch", "meshfold")
"""Packages whose Functions are parts of ops."""


@contextmanager
def functions_met(on_call: OnCall) -> Iterator[None]:
    """A context in which on_call(Function, positional arguments) answers what Function.apply is
    asked, but for calls inside of on_call; not for threads side by side.

    `square = Square.apply`, written when the user's file was imported, is torch's own method: that
    calls `apply` of the class above Function, which is stood in for as well. From torch 2.14 it is
    all in C, and what is stood in for are such names of modules."""
    before = vars(Function)["apply"]
    is_inside = False

    def apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
        if is_inside or not _is_met(function, args, kwargs):
            return before.__get__(None, function)(*args, **kwargs)
        return met(function, args, kwargs)

    def apply_by_alias(function: type[Function], *args: Any, **kwargs: Any) -> Any:
        if is_inside or not _is_met(function, args, kwargs):
            if before_above is not None:  # one of these contexts inside another
                return before_above.__get__(None, function)(*args, **kwargs)
            return super(above, function).apply(*args, **kwargs)
        return met(function, args, kwargs)

    def met(function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal is_inside
        is_inside = True
        try:
            return on_call(function, _positional(function, args, kwargs))
        finally:
            is_inside = False

    above = _class_above()
    before_above = vars(above).get("apply")
    Function.apply = classmethod(apply)  # type: ignore[assignment]
    above.apply = classmethod(apply_by_alias)
    names = [] if isinstance(before, classmethod) else _names_in_modules()
    for scope, name, method in names:
        scope[name] = _late(method.__self__)
    try:
        yield
    finally:
        for scope, name, method in names:
            scope[name] = method
        Function.apply = before  # type: ignore[method-assign]
        if before_above is None:
            del above.apply
        else:
            above.apply = before_above


def _is_met(function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is one of a user's Function with tensors."""
    package = function.__module__.partition(".")[0]
    return package not in _OWN and _has_tensor((args, kwargs))


def _names_in_modules() -> list[tuple[dict[str, Any], str, Any]]:
    """Names of modules that stand for `apply` of a Function, where that is in C."""
    return [
        (vars(module), name, value)
        for key, module in list(sys.modules.items())
        if key.partition(".")[0] not in _OWN and isinstance(module, ModuleType)
        for name, value in list(vars(module).items())
        if type(value) is BuiltinMethodType and value.__name__ == "apply"
        if isinstance(value.__self__, type) and issubclass(value.__self__, Function)
    ]


def _late(function: type[Function]) -> Callable[..., Any]:
    """A call of what `apply` is by then."""
    return lambda *args, **kwargs: function.apply(*args, **kwargs)  # type: ignore[no-untyped-call]


def _class_above() -> Any:
    """Whose `apply` that of Function calls: it has none of its own."""
    found = getattr(torch.autograd.function, "_SingleLevelFunction", None)
    if found is None:  # pragma: no cover
        raise moved("_SingleLevelFunction")
    return found


def is_of_op(node: Any) -> bool:
    """Whether a node of the backward is the one that torch makes for an op of torch.library, which
    a graph keeps with its op."""
    function = vars(type(node)).get("_forward_cls")
    return getattr(function, "__module__", "") == library_autograd.__name__


def overload_of(op: Any) -> Any:
    """The overload that an op of torch.library stands for, the first of several; another object is
    itself."""
    if isinstance(op, library_ops.CustomOpDef):
        return op._opoverload
    if isinstance(op, torch._ops.OpOverloadPacket):
        packet: Any = op
        return getattr(packet, packet.overloads()[0])
    return op


def _has_tensor(values: object) -> bool:
    if isinstance(values, dict):
        values = tuple(values.values())
    if isinstance(values, (tuple, list)):
        return any(map(_has_tensor, values))
    return isinstance(values, torch.Tensor)


def _positional(
    function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """The arguments of forward in order, as torch allows names where there is setup_context."""
    if not kwargs:
        return args
    bound = inspect.signature(function.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args


@contextmanager
def outside_of_tracing() -> Iterator[None]:
    """A context in which ops run as if nothing were traced, and no mode saw them."""
    with _python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def gradients_on_fakes(
    results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """The gradients of `operands` for unknown ones of `results`."""
    given = [torch.empty_like(x) for x in results]
    return list(torch.autograd.grad(results, operands, given, allow_unused=True))


def below_autograd() -> AbstractContextManager[Any]:
    """A context in which results are no views for autograd: what a Function returns may be written
    to then."""
    guard: AbstractContextManager[Any] = torch._C._AutoDispatchBelowAutograd()
    return guard
