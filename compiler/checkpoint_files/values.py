"""Nested values as JSON, with their tensors beside: optimizer options, and `extra` of the user.

None, bool, int, float, str and lists are themselves. A tensor is {"tensor": NAME}, an array of
numpy {"array": NAME}; a tuple is {"tuple": [...]}, a dict {"dict": [[key, value], ...]}, since its
keys may be numbers, and a Counter {"Counter": [[key, value], ...]}.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshfold.checkpoint_files.dtypes import NAMES
from meshfold.errors import MeshfoldError, OptionError

_PLAIN = (type(None), bool, int, float, str)
_MAPPINGS = {"dict": dict, "Counter": Counter}
_MOST_DEPTH = 50
_TAKEN = (
    "a checkpoint takes None, bool, int, float, str, list, tuple, dict, Counter, dense tensors and "
    "arrays of numpy"
)


def encoded(value: Any, where: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """What json.dumps takes of a value. Its tensors are put into `tensors`, by `where` they are.

    Raises OptionError for what a checkpoint does not take.
    """
    if depth > _MOST_DEPTH:
        raise OptionError(f"{where[:60]}: nested deeper than {_MOST_DEPTH}; {_TAKEN}")
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor) or kind is np.ndarray:
        return _tensor(value, where, tensors)
    if kind in (list, tuple):
        nodes = [encoded(x, f"{where}[{k}]", tensors, depth + 1) for k, x in enumerate(value)]
        return nodes if kind is list else {"tuple": nodes}
    if kind in _MAPPINGS.values():
        if odd := [key for key in value if type(key) not in _PLAIN]:
            raise OptionError(f"{where} has the key {odd[0]!r}; name it by a string or a number")
        items = [
            [key, encoded(x, f"{where}[{key!r}]", tensors, depth + 1)] for key, x in value.items()
        ]
        return {kind.__name__: items}
    raise OptionError(f"{where} is of type {kind.__name__}; {_TAKEN}")


def _tensor(value: Any, where: str, tensors: dict[str, Tensor]) -> dict[str, str]:
    tag = "tensor" if isinstance(value, Tensor) else "array"
    if tag == "array":
        try:
            value = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape).copy())
        except TypeError as error:
            raise OptionError(f"{where} is an array of {value.dtype}; {_TAKEN}") from error
    plain = type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided
    if not plain or value.dtype not in NAMES:
        kind = f"{type(value).__name__} of {value.dtype}, {value.layout}"
        raise OptionError(f"{where} is a {kind}; {_TAKEN}")
    if where in tensors:
        raise OptionError(f"two tensors are called {where}; rename one")
    tensors[where] = value.detach()
    return {tag: where}


def decoded(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of encoded. Raises MeshfoldError for what it does not write."""
    if type(node) in _PLAIN:
        return node
    if type(node) is list:
        return [decoded(x, tensors) for x in node]
    match node:
        case {"tensor": str(name)} if name in tensors:
            return tensors[name]
        case {"array": str(name)} if name in tensors:
            return tensors[name].numpy()
        case {"tuple": [*items]}:
            return tuple(decoded(x, tensors) for x in items)
        case {"dict": [*items]} | {"Counter": [*items]}:
            ((tag, _),) = node.items()
            pairs = [item for item in items if type(item) is list and len(item) == 2]
            if len(pairs) == len(items) and all(type(key) in _PLAIN for key, _ in pairs):
                return _MAPPINGS[tag]({key: decoded(x, tensors) for key, x in pairs})
    raise MeshfoldError(f"{str(node)[:40]!r} is no value of a checkpoint; load another one")


def tensor_names(node: Any) -> list[str]:
    """The names of the tensors of an encoded value, in order."""
    if type(node) is dict:
        if (tag := next(iter(node), "")) in ("tensor", "array"):
            return [node[tag]]
        node = list(node.values())
    return [name for x in node for name in tensor_names(x)] if type(node) is list else []


def renamed(node: Any, names: Mapping[str, str]) -> Any:
    """An encoded value whose tensors have other names: old -> new, for all that it has."""
    if type(node) is list:
        return [renamed(x, names) for x in node]
    if type(node) is not dict:
        return node
    ((tag, value),) = node.items()
    return {tag: names[value] if tag in ("tensor", "array") else renamed(value, names)}
