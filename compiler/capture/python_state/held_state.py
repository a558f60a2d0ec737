"""What a graph cannot hold of a model's Python: state that forward changes.

A graph is one call of forward. Numbers that forward counts up (steps, a temperature) would stay as
they were in the traced call; if the next call computes something else with them, the model is
refused. What only counts (a log of calls) is left.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import nn

from meshfold.capture.python_state.buffers import alike
from meshfold.capture.python_state.snapshots import (
    OWN_OF_MODULES,
    Snapshot,
    attributes_of,
    is_of_user,
    shared_state,
)
from meshfold.errors import CaptureError

State = Mapping[tuple[str, str], Any]
"""Plain values by (module path, attribute); those that instances share by ("", "file:name") and
("", "module:Class.name")."""

Changes = Mapping[tuple[str, str], tuple[Any, Any]]
"""Plain values before and after forward, of those that it changed, by the keys of State."""

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_MOST = 64
"""Entries of the longest container that is looked at."""
_DEPTH = 4
"""Of containers in containers."""
_OF_GRAPHS = frozenset(("_parameters", "_buffers", "_flat_weights", "_flat_weight_refs"))
"""What modules of torch keep their parameters and buffers in: a graph has these."""
_TABLES = _OF_GRAPHS | OWN_OF_MODULES - {"training"}
"""What else they keep beside what a user gives them."""
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that hold any number of others."""


@dataclass(frozen=True)
class _Holder:
    """What holds values by name: a module, an object of the user in one, and the globals and
    classes of a user's code. path, prefix: of the keys of State."""

    path: str
    prefix: str
    owner: Any

    @property
    def values(self) -> Mapping[str, Any]:
        if isinstance(self.owner, nn.Module):
            return {name: x for name, x in vars(self.owner).items() if name not in _TABLES}
        return self.owner if isinstance(self.owner, dict) else getattr(self.owner, "__dict__", {})

    def write(self, name: str, value: Any) -> None:
        if isinstance(self.owner, dict):
            self.owner[name] = value
        elif isinstance(self.owner, nn.Module):
            # A buffer of that name, if there is one, stays behind it.
            vars(self.owner)[name] = value
        else:
            setattr(self.owner, name, value)


def _holders(model: nn.Module) -> Iterator[_Holder]:
    shared: dict[int, _Holder] = {}
    for path, module in model.named_modules():
        holder = _Holder(path, "", module)
        yield holder
        for name, value in holder.values.items():
            if is_of_user(type(value)) and not isinstance(value, (nn.Module, torch.Tensor, type)):
                yield _Holder(path, f"{name}.", value)
        if is_of_user(type(module)):
            space = getattr(type(module).forward, "__globals__", {})
            shared[id(space)] = _Holder("", f"{space.get('__file__')}:", space)
            for base in filter(is_of_user, type(module).__mro__):
                prefix = f"{base.__module__}:{base.__qualname__}."
                shared[id(base)] = _Holder("", prefix, base)
    yield from shared.values()


def plain_state(model: nn.Module) -> State:
    """The plain values that forward can change."""
    return {
        (holder.path, holder.prefix + name): copy.copy(value)
        for holder in _holders(model)
        for name, value in holder.values.items()
        if not name.startswith("__") and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple) and len(value) <= _MOST:  # a torch.Size is one
        return all(_is_plain(x) and not isinstance(x, (list, dict)) for x in value)
    if isinstance(value, (list, dict)) and len(value) <= _MOST:
        entries = value.values() if isinstance(value, dict) else value
        return all(issubclass(type(entry), _PLAIN) for entry in entries)
    return issubclass(type(value), _PLAIN)  # a Number says that it is a float


def changed_state(before: State, model: nn.Module) -> Changes:
    """What has changed since `before`."""
    now = plain_state(model)
    return {
        k: (before.get(k), new) for k, new in now.items() if k not in before or before[k] != new
    }


Kept = Mapping[tuple[str, str], Any]
"""Tensors, and containers with tensors, by the keys of State."""


def _kept_tensors(model: nn.Module) -> Kept:
    return {
        (holder.path, holder.prefix + name): _copied(value)
        for holder in _holders(model)
        for name, value in holder.values.items()
        if not name.startswith("__") and _leaves(value)
    }


def _copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (dict, list)) else value


def set_values(model: nn.Module, values: Mapping[tuple[str, str], Any]) -> None:
    """Set what the keys of State name. Raises NewModulesError for a module, or an object in one,
    that is not there."""
    if not values:
        return
    holders = {(holder.path, holder.prefix): holder for holder in _holders(model)}
    for (path, name), value in values.items():
        start = max(name.rfind("."), name.rfind(":")) + 1
        holder = holders.get((path, name[:start]))
        if holder is None:
            raise NewModulesError
        holder.write(name[start:], value)


def _leaves(value: Any, depth: int = _DEPTH) -> list[torch.Tensor]:
    """The tensors in containers of up to _MOST entries."""
    if isinstance(value, torch.Tensor):
        return [value]
    if depth and isinstance(value, (dict, list, tuple)) and len(value) <= _MOST:
        entries = value.values() if isinstance(value, dict) else value
        return [leaf for entry in entries for leaf in _leaves(entry, depth - 1)]
    return []


def _buffers(model: nn.Module) -> dict[tuple[str, str], torch.Tensor]:
    return {
        (path, name): buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _fresh(value: Any, like: Callable[[torch.Tensor], torch.Tensor], depth: int = _DEPTH) -> Any:
    """The same with other tensors in it."""
    if isinstance(value, torch.Tensor):
        return like(value)
    if depth and isinstance(value, dict):
        return {key: _fresh(entry, like, depth - 1) for key, entry in value.items()}
    if depth and type(value) in (list, tuple):
        return type(value)(_fresh(entry, like, depth - 1) for entry in value)
    return value


def _members(model: nn.Module) -> dict[str, object]:
    """The children and parameters of every module, by name. A child is what holds its attributes:
    an export has stand-ins for those with two names, new ones with every question."""
    return {
        f"{path}.{name}".strip("."): (
            object.__getattribute__(member, "__dict__") if isinstance(member, nn.Module) else member
        )
        for path, module in model.named_modules(remove_duplicate=False)
        for name, member in (*module._modules.items(), *module._parameters.items())
    }


class HeldState:
    """What else forward can change, besides plain values: caches, and what closures, functions and
    counters hold; which children and parameters modules have; and the tensors that modules keep."""

    def __init__(self, model: nn.Module) -> None:
        self._before = Snapshot({**attributes_of(model), **shared_state(model)})
        self._kept = _kept_tensors(model)
        self._buffers = _buffers(model)
        self._members = _members(model)

    def kept(self, model: nn.Module) -> Kept:
        """Where other tensors are kept than before, buffers only where a graph cannot write what
        they became (meshfold.capture.python_state.buffers)."""
        before = {key: _leaves(value) for key, value in self._kept.items()}
        now = _kept_tensors(model)
        kept = {k: x for k, x in now.items() if not _same(_leaves(x), before.get(k, []))}
        for key, new in _buffers(model).items():
            old = self._buffers.get(key)
            if old is None or not alike(new, old):
                kept[key] = new
        return kept

    def change(self, model: nn.Module, known: Iterable[tuple[str, str]]) -> str:
        """The first of the changes that is not `known`, of Changes or Kept, by name; "" if there is
        none. Writes to parameters and buffers are the graph's. Raises CaptureError for a container
        of modules or parameters that grows."""
        known = set(known)
        own = {f"{path}.{name}".strip(".") for path, name in known}
        shared = {name.replace(":", ".").rpartition(".")[2] for _, name in known if ":" in name}
        for label in self._before.changes():
            parts = label.split(".")
            opened = {".".join(parts[:k]) for k in range(1, len(parts) + 1)}
            if own.isdisjoint(opened) and _OF_GRAPHS.union(shared).isdisjoint(parts):
                return label
        return self._changed_member(model)

    def _changed_member(self, model: nn.Module) -> str:
        """Which a call has replaced, added or removed."""
        before, now = self._members, _members(model)
        for name in (n for n in now if n not in before):
            # What has grown may grow again; an export does not see that.
            if isinstance(model.get_submodule(name.rpartition(".")[0]), _CONTAINERS):
                raise refused_change({}, {}, name)
        changed = (n for n in {**before, **now} if before.get(n) is not now.get(n))
        return next(changed, "")


class NewModulesError(Exception):
    """Forward has made modules or objects that a fresh copy of the model does not have."""


def fresh_kept(kept: Kept, like: Callable[[torch.Tensor], torch.Tensor]) -> Kept:
    """`kept` with other tensors in place of its own, in the order of kept_leaves."""
    return {key: _fresh(value, like) for key, value in kept.items()}


def kept_leaves(kept: Kept) -> list[torch.Tensor]:
    """The tensors of `kept`."""
    return [leaf for value in kept.values() for leaf in _leaves(value)]


def refused_change(changed: Changes, kept: Kept, held: str) -> CaptureError:
    """That forward computes something else with what it has changed. held: the name of what is
    neither in `changed` nor in `kept`."""
    if changed:
        (path, name), (old, value) = next(iter(changed.items()))
        what = f"{path}.{name}" if path else name
        return CaptureError(
            f"forward changes {what} (from {old!r} to {value!r}), and its next call "
            "computes something else, which a graph of one call cannot; pass what changes as an "
            "input tensor",
            op="Python",
        )
    what = _text(next(iter(kept))) if kept else held
    return CaptureError(
        f"forward changes what {what} holds, and its next call computes something else, which a "
        "graph of one call cannot; register it as a buffer, or pass it as an input tensor",
        op="Python",
    )


def _text(key: tuple[str, str]) -> str:
    """Of State, for messages."""
    return ".".join(filter(None, key)).rpartition("/")[2].replace(".py:", ".").replace(":", ".")
