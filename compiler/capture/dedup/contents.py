"""What a value holds, as something to compare with later: the same object may hold something else
then, and another one the same."""

import hashlib
from collections.abc import Hashable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from meshfold.capture.dedup.arguments import comparable_leaf, is_plain

DEPTH = 5
"""Of containers and objects in each other; what is deeper is compared by identity."""


def content_of(value: Any, depth: int = DEPTH) -> Hashable:
    """Equal for what holds the same: numbers and text by type and value, arrays and containers by
    their entries, objects by class and attributes, tensors by identity and the number of times that
    they were written. Anything else is compared by `==` where that can be asked, or by identity."""
    if is_plain(value):
        return comparable_leaf(value)
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return torch.Tensor, id(value), None if value.is_inference() else value._version
    if isinstance(value, np.ndarray | np.generic):
        return kind, str(value.dtype), value.shape, _entries(np.asarray(value), depth - 1)
    if isinstance(value, nn.Module):
        return nn.Module, id(value)
    if depth < 1 or isinstance(value, type | ModuleType):
        return _Other(value)
    if isinstance(value, dict):
        pairs = value.items()
        return kind, tuple((content_of(k, depth - 1), content_of(v, depth - 1)) for k, v in pairs)
    if isinstance(value, list | tuple):
        return kind, tuple(content_of(v, depth - 1) for v in value)
    if isinstance(value, set | frozenset):
        return kind, frozenset(content_of(v, depth - 1) for v in value)
    if depth > 1 and has_attributes(value):
        return kind, content_of(dict(vars(value)), depth - 1)
    return _Other(value)


def has_attributes(value: Any) -> bool:
    """Whether a value, no container nor module, is what its attributes are."""
    return bool(getattr(value, "__dict__", None)) and not callable(value)


def _entries(array: np.ndarray[Any, Any], depth: int) -> Hashable:
    if array.dtype.hasobject and depth < 1:
        return _Other(array)
    if array.dtype.hasobject:
        return tuple(content_of(entry, depth) for entry in array.ravel().tolist())
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


class _Other:
    """Equal to what wraps the same object, or an equal one that can be hashed."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Other):
            return NotImplemented
        if self.value is other.value:
            return True
        if type(self.value) is not type(other.value):
            return False
        try:
            return (self.value == other.value) is True
        except Exception:  # whatever a class of the user's does there
            return False

    def __hash__(self) -> int:
        return hash(type(self.value))
