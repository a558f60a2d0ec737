"""Arguments and results of a child module as data: what to compare, and how to restore them.

A call is described by `pack`: its tensors, each once however often it is passed, and a template in
which a TensorSlot stands for a tensor. Templates of equal calls are equal, and with other tensors
they give the arguments (or the results) of another call.
"""

import enum
from dataclasses import dataclass
from typing import Any

import torch

from meshfold.torch_compat.pytree import TensorSlot, flat, map_leaves

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_TORCH_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)


class NotPlainError(Exception):
    """A value is neither a tensor nor plain data, so calls with it cannot be compared."""


@dataclass(frozen=True, slots=True)
class PassedThrough:
    """A tensor of a result that is argument number `index`, returned unchanged."""

    index: int


def is_plain(value: object) -> bool:
    return isinstance(value, (*_PLAIN, *_TORCH_PLAIN, enum.Enum))


def pack(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """Template and tensors of nested containers; inverse of fill_slots. Raises NotPlainError."""
    tensors: list[torch.Tensor] = []
    numbers: dict[int, int] = {}

    def strip(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(tensors)
                tensors.append(leaf)
            return TensorSlot(numbers[id(leaf)])
        if not is_plain(leaf):
            raise NotPlainError(type(leaf).__name__)
        return leaf

    return map_leaves(strip, value), tensors


def comparable(template: Any) -> object:
    """A hashable form in which equal means equal: 1, 1.0 and True differ, so do tuple and list."""
    leaves, containers = flat(template)
    return containers, tuple(map(comparable_leaf, leaves))


def comparable_leaf(value: Any) -> object:
    """The same for what is_plain, and for slots."""
    return type(value), value.hex() if isinstance(value, float) else value
