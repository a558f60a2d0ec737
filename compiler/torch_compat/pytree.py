"""Nested containers of tensors: leaves by path, and the same containers with other leaves.

Containers are dict, list, tuple, named tuple, OrderedDict, defaultdict, deque, and dataclasses that
torch.export.register_dataclass knows. Anything else is a leaf: tensors, None, objects, mappings of
other classes. The one file that uses torch.utils._pytree.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch.utils import _pytree

_CONTAINERS = (dict, list, tuple, OrderedDict, defaultdict, deque)


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A leaf that stands for tensor number `index`."""

    index: int


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf, the path of keys joined by dots ("images.0"); "" for a leaf that
    is the whole tree."""
    leaves, _ = _pytree.tree_flatten_with_path(tree, _is_leaf)
    return [(_path(keys), leaf) for keys, leaf in leaves]


def flat(tree: Any) -> tuple[list[Any], object]:
    """The leaves, and the containers around them as a value to compare and hash."""
    return _pytree.tree_flatten(tree, _is_leaf)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same containers around `function(leaf)`."""
    return _pytree.tree_map(function, tree, is_leaf=_is_leaf)


def map_named(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """The same containers around `function(path, leaf)`, with paths as of named_leaves."""
    return _pytree.tree_map_with_path(
        lambda keys, leaf: function(_path(keys), leaf), tree, is_leaf=_is_leaf
    )


def fill_slots(template: Any, values: Sequence[Any]) -> Any:
    """`template` with `values[index]` for every TensorSlot of it."""
    return map_leaves(lambda x: values[x.index] if isinstance(x, TensorSlot) else x, template)


def named_contents(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of everything inside: mappings, sequences and objects of any class are opened,
    too, objects by their attributes."""
    for inner, leaf in named_leaves(tree):
        name = f"{path}.{inner}" if path and inner else path or inner
        if isinstance(leaf, torch.Tensor):
            yield name, leaf
        elif isinstance(leaf, (tuple, list)):
            yield from named_contents(dict(enumerate(leaf)), name)
        elif isinstance(leaf, Mapping) or hasattr(leaf, "__dict__"):
            yield from named_contents(dict(leaf if isinstance(leaf, Mapping) else vars(leaf)), name)
        else:
            yield name, leaf


def _is_leaf(value: Any) -> bool:
    if type(value) in _CONTAINERS or _pytree.is_namedtuple_instance(value):
        return False
    node = _pytree.SUPPORTED_NODES.get(type(value)) if is_dataclass(value) else None
    return node is None or node.flatten_with_keys_fn is None


def _path(keys: Sequence[Any]) -> str:
    """keys: a MappingKey, a SequenceKey or a GetAttrKey for each container."""
    names = {_pytree.MappingKey: "key", _pytree.SequenceKey: "idx", _pytree.GetAttrKey: "name"}
    return ".".join(str(getattr(key, names[type(key)])) for key in keys)
