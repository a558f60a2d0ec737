"""Copies of modules with other tensors in place of parameters and buffers.

A copy is a deepcopy whose memo already holds a new tensor for every parameter and buffer. So ties
stay ties, no storage is copied whatever the model's size, and the model is not touched.
"""

import copy
import threading
from collections.abc import Callable, Collection, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.torch_compat.closures import rebind_closures


def copy_with(model: nn.Module, new_tensor: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy with `new_tensor(tensor)` for each parameter and buffer, in the model's mode.

    Also for what modules keep that was computed of them: no deepcopy takes it (the weight that
    weight_norm makes anew before every forward)."""
    tensors = (*model.parameters(), *model.buffers(), *_computed(model))
    memo: dict[int, Any] = {id(tensor): new_tensor(tensor) for tensor in tensors}
    _copy_refused(model, memo)
    copied = copy.deepcopy(model, memo)
    rebind_closures(copied, memo)
    return copied


def _copy_refused(model: nn.Module, memo: dict[int, Any]) -> None:
    """Adds to `memo` what modules keep that deepcopy refuses and that holds no tensor of theirs:
    Python's modules and locks as they are; dicts whose attributes are their entries, which raise
    KeyError for the method that deepcopy looks for, as dicts of that class."""
    for value in [value for module in model.modules() for value in vars(module).values()]:
        if isinstance(value, _SHARED):
            memo[id(value)] = value
        elif _is_refused_dict(value):
            _copy_dict(value, memo)


_SHARED = (ModuleType, type(threading.Lock()), type(threading.RLock()))


def _is_refused_dict(value: Any) -> bool:
    if not isinstance(value, dict) or not hasattr(type(value), "__getattr__"):
        return False
    try:
        getattr(value, "__deepcopy__", None)
    except KeyError:
        return True
    return False


def _copy_dict(of: dict[Any, Any], memo: dict[int, Any]) -> dict[Any, Any]:
    made = memo[id(of)] = type(of).__new__(type(of))
    for key, value in dict.items(of):
        copied = _copy_dict(value, memo) if _is_refused_dict(value) else copy.deepcopy(value, memo)
        dict.__setitem__(made, key, copied)
    return made


def _computed(model: nn.Module) -> Iterator[Tensor]:
    """Tensors with a history that modules keep, as attributes or in dicts and lists (features that
    a hook put there)."""
    kept: list[Any] = [value for module in model.modules() for value in vars(module).values()]
    for value in kept:
        if isinstance(value, Tensor) and not value.is_leaf:
            yield value
        elif isinstance(value, (dict, list)):
            contents = value.values() if isinstance(value, dict) else value
            yield from (x for x in contents if isinstance(x, Tensor) and not x.is_leaf)


def meta_copy(model: nn.Module, valued: Collection[str] = ()) -> nn.Module:
    """A copy on the meta device, but for the buffers of these names, which keep their values."""
    buffers = {id(model.get_buffer(name)) for name in valued}

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) in buffers:
            return tensor.detach().clone()
        return empty_like(tensor, torch.device("meta"))

    return copy_with(model, copied)


def empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape, strides and dtype on `device`; a Parameter for one."""
    empty = torch.empty_like(tensor, device=device, requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty
