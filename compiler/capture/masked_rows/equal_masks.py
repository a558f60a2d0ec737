"""Masks that are equal for every batch, since they are made of the same in the same way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshfold.capture.masked_rows.functions import name_of

_PLAIN = (bool, int, float, type(None), torch.dtype)
_MAKERS = frozenset(
    (
        *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "invert", "logical_and"),
        *("logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not"),
        *("bool", "isnan", "isfinite", "isinf", "view", "reshape", "flatten", "squeeze"),
        *("unsqueeze", "contiguous"),
    )
)


@dataclass(frozen=True)
class _Made:
    """How a tensor was made. versions: of the memory of the result and of tensors among args."""

    result: Tensor
    name: str
    args: tuple[Any, ...]
    versions: tuple[int, ...]

    def is_unchanged(self) -> bool:
        return self.versions == _versions((self.result, *self.args))


class EqualMasks:
    """What one call of a model made of which tensors, as far as masks are made so."""

    def __init__(self) -> None:
        self.made: dict[int, _Made] = {}
        """By id of the result, which lives as long as this."""

    def see(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note how a tensor is made, where it may be a mask or what one is made of."""
        name = name_of(func)
        if name not in _MAKERS or kwargs or not isinstance(result, Tensor):
            return
        if all(isinstance(a, (Tensor, *_PLAIN)) for a in args):
            made = _Made(result, name, tuple(args), _versions((result, *args)))
            self.made[id(result)] = made

    def are_equal(self, mask: Any, other: Any) -> bool:
        """Whether two masks, or what they are made of, are equal for every batch."""
        if mask is other:
            return True
        if not isinstance(mask, Tensor) or not isinstance(other, Tensor):
            return type(mask) is type(other) and isinstance(mask, _PLAIN) and mask == other
        first, second = self.made.get(id(mask)), self.made.get(id(other))
        if first is None or second is None or first.name != second.name:
            return False
        if not first.is_unchanged() or not second.is_unchanged():
            return False
        return len(first.args) == len(second.args) and all(
            map(self.are_equal, first.args, second.args)
        )


def _versions(tensors: Sequence[Any]) -> tuple[int, ...]:
    return tuple(t._version for t in tensors if isinstance(t, Tensor))
