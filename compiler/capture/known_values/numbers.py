"""Numbers that a model asks a tensor for while it is traced, on tensors without values."""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from meshfold.capture.known_values.refusals import function_name, refused_number
from meshfold.errors import CaptureError


class Asked(Protocol):
    """Answers in assertions."""

    def compared(self, condition: Tensor) -> bool:
        """The truth of a comparison."""

    def tested(self, number: "Number") -> float:
        """What math.isnan and its like are asked about."""

    def noted(self, number: "Number") -> "Number":
        """The same, which may outlive forward."""


def _comparison(function: Callable[..., Tensor]) -> Any:
    def call(self: "Number", other: Any) -> bool:
        return self._compared(function, other)

    return call


def _arithmetic(function: Callable[..., Tensor]) -> Any:
    def call(self: "Number", *others: Any) -> "Number":
        return self._made(function, *others)

    return call


class Number:
    """x.item() of a tensor without values. Comparisons of it are answered in assertions, it may be
    kept and printed; all else that needs a number raises CaptureError. make: computes the tensor
    that holds it; kind: its type; name: of the function that gave it, source: where."""

    __slots__ = ("__weakref__", "_kind", "checks", "make", "name", "source")

    def __init__(
        self, make: Callable[[], Tensor], kind: type, checks: Asked, name: str, source: str
    ) -> None:
        self.make, self._kind = make, kind
        self.checks = checks
        self.name, self.source = name, source

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """For isinstance: forward must not take another way with it than with a number."""
        return self._kind

    @property
    def tensor(self) -> Tensor:
        return self.make()

    def refused(self) -> CaptureError:
        return refused_number(self.name, self.source)

    def _made(self, function: Callable[..., Tensor], *others: Any) -> "Number":
        """Computed when it is asked for: what is only kept is no part of the graph."""
        is_float = function is operator.truediv or any(
            isinstance(x, float) for x in (self, *others)
        )
        found = Number(
            lambda: function(self.tensor, *map(_plain, others)),
            float if is_float else int,
            self.checks,
            self.name,
            self.source,
        )
        return self.checks.noted(found)

    def _compared(self, function: Callable[..., Tensor], other: Any) -> bool:
        return self.checks.compared(function(self.tensor, _plain(other)))

    def __bool__(self) -> bool:
        return self._compared(operator.ne, 0)

    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)
    __eq__, __ne__ = _comparison(operator.eq), _comparison(operator.ne)
    __add__ = __radd__ = _arithmetic(operator.add)
    __mul__ = __rmul__ = _arithmetic(operator.mul)
    __sub__, __rsub__ = _arithmetic(operator.sub), _arithmetic(lambda x, y: y - x)
    __truediv__, __floordiv__ = _arithmetic(operator.truediv), _arithmetic(operator.floordiv)
    __mod__, __pow__ = _arithmetic(operator.mod), _arithmetic(operator.pow)
    __neg__, __abs__ = _arithmetic(operator.neg), _arithmetic(abs)

    def __round__(self, digits: int = 0) -> "Number":
        return self._made(lambda x: torch.round(x, decimals=digits))

    __hash__ = object.__hash__

    def __float__(self) -> float:
        return self.checks.tested(self)

    def __index__(self) -> int:
        raise self.refused()

    def __format__(self, _: str) -> str:
        """In messages and logs."""
        return "?"

    def __repr__(self) -> str:
        return "?"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.refused()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        refuse_numbers((*args, *(kwargs or {}).values()))
        raise refused_number(function_name(func), "")


def number_of(tensor: Tensor, checks: Asked, name: str, source: str) -> Number:
    """What a function of this name gives of a tensor."""
    kind: type = float if tensor.is_floating_point() else int
    kind = bool if tensor.dtype == torch.bool else kind
    return checks.noted(Number(lambda: tensor, kind, checks, name, source))


def refuse_numbers(arguments: Iterable[Any]) -> None:
    """Raises CaptureError for a Number that torch is to compute with."""
    for argument in arguments:
        if isinstance(argument, Number):
            raise argument.refused()


def _plain(value: Any) -> Any:
    return value.tensor if isinstance(value, Number) else value
