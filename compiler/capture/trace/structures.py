"""The structure of what a model returns, kept to put other tensors into it.

Containers are those that torch_compat.pytree.named_contents opens, by the same paths: mappings,
sequences, named tuples, dataclasses and other objects of any class. All of it is plain data, so it
can be sent to another process with the rest of a captured program.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType
from typing import Any, Literal

import torch

from meshfold.capture.known_values.numbers import Number
from meshfold.errors import CaptureError

_PLAIN = (NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class Leaf:
    """The tensor of that path."""

    path: str


@dataclass(frozen=True, slots=True)
class Constant:
    """What is no tensor: the same for every batch."""

    value: Any


@dataclass(frozen=True, slots=True)
class Container:
    """An object of class `kind` around other nodes. way: how it is filled."""

    kind: type
    way: Literal["mapping", "sequence", "attributes"]
    keys: tuple[Any, ...]
    items: tuple["Node", ...]


Node = Leaf | Constant | Container


def structure_of(value: Any, path: str = "") -> Node:
    """The structure of what a model returned. path: that of `value` itself."""
    if isinstance(value, torch.Tensor):
        return Leaf(path)
    if isinstance(value, Number):
        raise value.refused()
    if isinstance(value, _PLAIN):
        return Constant(value)
    way: Literal["mapping", "sequence", "attributes"] = "attributes"
    if isinstance(value, Mapping):
        way, inside = "mapping", dict(value)
    elif isinstance(value, Sequence):
        way = "sequence"
        names = value._fields if hasattr(value, "_fields") else range(len(value))
        inside = dict(zip(names, value, strict=True))
    else:
        inside = attributes_of(value)
    items = tuple(structure_of(x, f"{path}.{k}" if path else str(k)) for k, x in inside.items())
    return Container(type(value), way, tuple(inside), items)


def attributes_of(value: object) -> dict[str, Any]:
    """Attributes of an object, by name: of a dataclass its fields; empty if it has none."""
    if is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
    return dict(vars(value)) if hasattr(value, "__dict__") else {}


def filled_structure(node: Node, tensors: Mapping[str, Any]) -> Any:
    """The structure around `tensors`, by path. A tensor that is not there is None, as is a
    container of such tensors, and no entry of a dict. Raises CaptureError where a container cannot
    be made anew."""
    if isinstance(node, Leaf):
        return tensors.get(node.path)
    if isinstance(node, Constant):
        return node.value
    items = {
        key: None if _is_absent(item, tensors) else filled_structure(item, tensors)
        for key, item in zip(node.keys, node.items, strict=True)
        if node.way != "mapping" or not _is_absent(item, tensors)
    }
    try:
        return _made(node, items)
    except Exception as error:
        name = node.kind.__name__
        raise CaptureError(
            f"the model returns a {name}, which cannot be made anew around the outputs of a step "
            f"({error}); return a tuple, a dict or a dataclass, or ask for no outputs",
            op=name,
        ) from error


def _is_absent(node: Node, tensors: Mapping[str, Any]) -> bool:
    """Whether a node has tensors, and none of them is there."""
    paths = [*_paths(node)]
    return bool(paths) and not any(path in tensors for path in paths)


def _paths(node: Node) -> Iterator[str]:
    if isinstance(node, Leaf):
        yield node.path
    elif isinstance(node, Container):
        for item in node.items:
            yield from _paths(item)


def _made(node: Container, items: dict[Any, Any]) -> Any:
    kind: Any = node.kind
    if node.way == "mapping":
        if issubclass(kind, defaultdict):
            return kind(None, items)
        is_record = is_dataclass(kind)
        return kind(**items) if is_record else kind(items)
    if node.way == "sequence":
        return kind._make(items.values()) if hasattr(kind, "_make") else kind([*items.values()])
    made = object.__new__(kind)
    for name, item in items.items():
        object.__setattr__(made, name, item)
    return made


def is_scalar(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be a loss."""
    return tensor.is_floating_point() and tensor.ndim == 0
