"""What a graph cannot hold of a model's Python: state that forward changes.

A graph is one call of forward. Numbers that forward counts up (steps, a temperature) would stay as
they were in the traced call; if the next call computes something else with them, the model is
refused. What only counts (a log of calls) is left.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import is_
from typing import Any

import torch
from torch import nn

from meshfold.capture.python_state.snapshots import (
    Snapshot,
    attributes_of,
    is_of_user,
    shared_state,
)
from meshfold.errors import CaptureError
from meshfold.torch_compat.fake_tensors import fake_like, fake_mode, modes_of

State = Mapping[tuple[str, str], Any]
"""Plain values by (module path, attribute); those that instances share by ("", "file:name") and
("", "module:Class.name")."""

Changes = Mapping[tuple[str, str], tuple[Any, Any]]
"""Plain values before and after forward, of those that it changed, by the keys of State."""

_PLAIN = (bool, int, float, str, type(None))
_MOST = 64
"""Entries of the longest container that is looked at."""


def plain_state(model: nn.Module) -> State:
    """The plain values that forward can change: of modules, of a user's objects in them, and of the
    globals and classes of a user's code."""
    found: dict[tuple[str, str], Any] = {}
    shared: dict[int, tuple[str, Mapping[str, Any]]] = {}
    for path, module in model.named_modules():
        own = {name: x for name, x in vars(module).items() if not name.startswith("_")}
        _add(found, path, "", own)
        for name, value in own.items():
            if is_of_user(type(value)) and not isinstance(value, (nn.Module, torch.Tensor, type)):
                _add(found, path, f"{name}.", getattr(value, "__dict__", {}))
        if is_of_user(type(module)):
            space = getattr(type(module).forward, "__globals__", {})
            shared[id(space)] = f"{space.get('__file__')}:", space
            for base in filter(is_of_user, type(module).__mro__):
                shared[id(base)] = f"{base.__module__}:{base.__qualname__}.", vars(base)
    for prefix, values in shared.values():
        _add(found, "", prefix, values)
    return found


def _add(
    found: dict[tuple[str, str], Any], path: str, prefix: str, values: Mapping[str, Any]
) -> None:
    for name, value in values.items():
        if not name.startswith("__") and _is_plain(value):
            found[path, prefix + name] = copy.copy(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, dict)) and len(value) <= _MOST:
        entries = value.values() if isinstance(value, dict) else value
        return all(isinstance(entry, _PLAIN) for entry in entries)
    return isinstance(value, _PLAIN)


def changed_state(before: State, model: nn.Module) -> Changes:
    """What has changed since `before`."""
    now = plain_state(model)
    return {
        k: (before.get(k), new) for k, new in now.items() if k not in before or before[k] != new
    }


Kept = Mapping[tuple[str, str], Any]
"""Tensors, and containers with tensors, that modules keep, by (module path, attribute)."""


def _kept_tensors(model: nn.Module) -> Kept:
    found = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if not name.startswith("_") and _leaves(value):
                found[path, name] = copy.copy(value) if isinstance(value, (dict, list)) else value
    return found


def _leaves(value: Any) -> list[torch.Tensor]:
    """The tensors in containers of up to _MOST entries."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (dict, list, tuple)) and len(value) <= _MOST:
        entries = value.values() if isinstance(value, dict) else value
        return [leaf for entry in entries for leaf in _leaves(entry)]
    return []


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _fresh(value: Any, like: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same with other tensors in it."""
    if isinstance(value, torch.Tensor):
        return like(value)
    if isinstance(value, dict):
        return {key: _fresh(entry, like) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_fresh(entry, like) for entry in value)
    return value


_OF_GRAPHS = frozenset(("_parameters", "_buffers", "_flat_weights"))
"""What modules of torch keep their parameters and buffers in: a graph has these."""


class HeldState:
    """What else forward can change, besides plain values: caches, and what closures, functions and
    counters hold; and the tensors that modules keep."""

    def __init__(self, model: nn.Module) -> None:
        self._before = Snapshot({**attributes_of(model), **shared_state(model)})
        self._kept = _kept_tensors(model)

    def kept(self, model: nn.Module) -> Kept:
        """The attributes in which modules keep other tensors than before."""
        before = {key: _leaves(value) for key, value in self._kept.items()}
        now = _kept_tensors(model)
        return {k: x for k, x in now.items() if not _same(_leaves(x), before.get(k, []))}

    def change(self, known: Iterable[tuple[str, str]]) -> str:
        """The first of the changes that is not `known`, of Changes or Kept, by name; "" if there is
        none. Writes to parameters and buffers are the graph's."""
        known = set(known)
        own = {f"{path}.{name}".strip(".") for path, name in known}
        shared = {name.replace(":", ".").rpartition(".")[2] for _, name in known if ":" in name}
        for label in self._before.changes():
            parts = label.split(".")
            opened = {".".join(parts[:k]) for k in range(1, len(parts) + 1)}
            if _OF_GRAPHS.isdisjoint(parts) and own.isdisjoint(opened) and parts[-1] not in shared:
                return label
        return ""


Again = Callable[[Callable[[nn.Module], None], int], bool]
"""(prepare, num_calls) -> whether that call of another copy of the model, prepared so, is traced
as the same graph."""


class _NewModulesError(Exception):
    """Forward has made modules that a fresh copy of the model does not have."""


def refuse_kept_tensors(kept: Kept, held: str, again: Again) -> None:
    """Raises CaptureError where forward reads again what a call of it before has left.

    kept: tensors that modules keep since; held: the name of what else has changed, "" if nothing.
    """

    def prepare(fresh: nn.Module) -> None:
        modules = dict(fresh.named_modules())
        mode = next(iter(modes_of(fresh)), None) or fake_mode()
        for (path, name), value in kept.items():
            if path in modules:
                setattr(modules[path], name, _fresh(value, lambda x: fake_like(x, mode)))

    def is_same(prepare: Callable[[nn.Module], None], num_calls: int) -> bool:
        try:
            return again(prepare, num_calls)
        except CaptureError:  # what is there then cannot be captured
            return False

    if kept and not is_same(prepare, 1):
        name = ".".join(filter(None, next(iter(kept))))
    elif held and not is_same(lambda _: None, 2):
        name = held
    else:
        return
    raise CaptureError(
        f"forward changes what {name} holds, and its next call computes something else, which a "
        "graph of one call cannot; register it as a buffer, or pass it as an input tensor",
        op="Python",
    )


def refuse_changing_state(changed: Changes, again: Again) -> None:
    """Raises CaptureError where forward computes something else with the plain state that it
    changed."""
    if not changed:
        return

    def prepare(fresh: nn.Module) -> None:
        modules = dict(fresh.named_modules())
        for (path, name), (_, value) in changed.items():
            if path not in modules:
                raise _NewModulesError
            if ":" not in name:  # what is shared has kept its change
                *owners, last = name.split(".")
                setattr(reduce(getattr, owners, modules[path]), last, copy.copy(value))

    try:
        is_same = again(prepare, 1)
    except _NewModulesError:
        # As BigBird does, which puts another attention in place for short sequences.
        is_same = again(lambda _: None, 2)
    if is_same:
        return
    (path, name), (old, value) = next(iter(changed.items()))
    where = f"{path}.{name}" if path else name
    raise CaptureError(
        f"forward changes {where} (from {old!r} to {value!r}), and its next call "
        "computes something else, which a graph of one call cannot; pass what changes as an input "
        "tensor",
        op="Python",
    )
