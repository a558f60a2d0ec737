"""Arguments and results of a child module as data: what to compare, and how to make them again.

A call is described by `pack`: its tensors, each once however often it is passed, and a template in
which a Slot stands for a tensor. Templates of equal calls are equal, and with other tensors they
give the arguments (or the results) of another call.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshfold.capture.trace.fake_model import has_children, map_children

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_TORCH_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)


class NotPlainError(Exception):
    """A value is neither a tensor nor plain data, so calls with it cannot be compared."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Tensor number `index` of a packed value."""

    index: int


@dataclass(frozen=True, slots=True)
class Passed:
    """In a result: tensor argument number `index`, returned as it came."""

    index: int


def is_plain(value: object) -> bool:
    return isinstance(value, (*_PLAIN, *_TORCH_PLAIN, enum.Enum))


def pack(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """Template and tensors of nested dicts, lists and tuples. Raises NotPlainError."""
    tensors: list[torch.Tensor] = []
    numbers: dict[int, int] = {}

    def visit(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            if id(part) not in numbers:
                numbers[id(part)] = len(tensors)
                tensors.append(part)
            return Slot(numbers[id(part)])
        if is_plain(part):
            return part
        if has_children(part):
            return map_children(part, lambda child, _: visit(child))
        raise NotPlainError(type(part).__name__)

    return visit(value), tensors


def unpack(template: Any, tensors: Sequence[Any]) -> Any:
    """Inverse of pack, with anything in place of the tensors."""
    if isinstance(template, Slot):
        return tensors[template.index]
    return map_children(template, lambda child, _: unpack(child, tensors))


def comparable(template: Any) -> object:
    """A hashable form in which equal means equal: 1, 1.0 and True differ, so do tuple and list."""
    if isinstance(template, dict):
        return dict, tuple((k, comparable(v)) for k, v in template.items())
    if isinstance(template, (list, tuple)):
        return type(template), tuple(map(comparable, template))
    if isinstance(template, float):
        return float, template.hex()
    return type(template), template
