"""Numbers, text and tables that forward read of a model when it was captured, and that may be
others by now.

A program holds them as constants. So a weight of a loss that is annealed (`model.beta = 0.1`), a
dropout probability that is raised or an entry of a configuration that is set after
meshfold.compile would have no effect, without a word. Attributes that forward may read (see
meshfold.training.calls.read_names) of modules, of their classes and of configurations, and globals
of the user's files are compared before a step; the model itself is not kept alive.
"""

import weakref
from argparse import Namespace
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from meshfold.capture.dedup.arguments import is_plain
from meshfold.capture.dedup.contents import content_of, has_attributes
from meshfold.capture.python_state.snapshots import is_of_user
from meshfold.errors import OptionError
from meshfold.training.calls.read_names import ReadNames

_OWN = frozenset(vars(nn.Module()))
_GONE = object()
_TABLES = (dict, list, tuple, set, frozenset)
_ARRAYS = (np.ndarray, np.generic, torch.Tensor)
_MOST = 64
"""Entries of a table."""
_NAMESPACES = (SimpleNamespace, Namespace)
_KERNELS = frozenset(("_attn_implementation_internal", "_experts_implementation_internal"))
"""Of a configuration of transformers: which kernel computes the same; verify sets them as well."""
_DEPTH = 3
"""Of objects in each other."""
WHAT_NEXT = (
    "compile the model again, or make it an argument of forward and pass it in the batch as a "
    "tensor"
)


@dataclass(frozen=True, slots=True)
class _Setting:
    """Attribute `name` of `owner`, which was `value` if that is plain data, and held `content`.
    identity: of an object whose own attributes are settings."""

    owner: Callable[[], Any]
    name: str
    label: str
    value: Any
    identity: int
    content: Hashable

    def change(self) -> str:
        owner = self.owner()
        if owner is None:
            return ""
        now = vars(owner).get(self.name, _GONE)
        if now is self.value or id(now) == self.identity or content_of(now) == self.content:
            return ""
        if now is _GONE:
            return f"{self.label} was there when the model was captured"
        if self.value is _GONE or not is_plain(now):
            return f"{self.label} is not what it was when the model was captured"
        return f"{self.label} is {now!r} and was {self.value!r} when the model was captured"


def _itself(owner: Any) -> Any:
    return owner


def _is_data(value: Any, depth: int = _DEPTH) -> bool:
    """Whether a value is numbers and text, or a table of them; no register of classes, say, which
    grows as other models are made."""
    if is_plain(value) or isinstance(value, _ARRAYS):
        return True
    if not depth or not isinstance(value, _TABLES) or len(value) > _MOST:
        return False
    entries = value.values() if isinstance(value, dict) else value
    return all(_is_data(entry, depth - 1) for entry in entries)


def _is_installed(file: ModuleType) -> bool:
    """Whether it is a library's, whose registers and caches are its own business."""
    return "site-packages" in (getattr(file, "__file__", None) or "")


def _is_opened(value: Any) -> bool:
    """Whether a value is what its attributes are, as a configuration. A logger or a lock is not."""
    kind = type(value)
    return has_attributes(value) and (kind in _NAMESPACES or is_of_user(kind))


class CapturedSettings:
    """The settings of `model`, of its classes and of the files of its code. names: those of the
    model itself."""

    def __init__(self, model: nn.Module) -> None:
        self._reads = reads = ReadNames.of(model)
        self._settings: list[_Setting] = []
        self._seen: set[tuple[int, str]] = set()
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if name not in _OWN and reads.may_read(module, name):
                    self._watch(module, name, f"{path}.{name}" if path else name, value)
        self.names = {s.name for s in self._settings if s.owner() is model}
        for owner, names in reads.shared(model):
            if isinstance(owner, ModuleType) and _is_installed(owner):
                continue
            for name, value in list(vars(owner).items()):
                if name in names and not name.startswith("__"):
                    self._watch(owner, name, f"{owner.__name__}.{name}", value)

    def _watch(self, owner: Any, name: str, label: str, value: Any, depth: int = _DEPTH) -> None:
        is_opened = bool(depth) and not _is_data(value) and _is_opened(value)
        if (
            name in _KERNELS
            or (id(owner), name) in self._seen
            or not (is_opened or _is_data(value))
        ):
            return
        self._seen.add((id(owner), name))
        if is_opened:
            for inner, held in list(vars(value).items()):
                if self._reads.may_read(value, inner):
                    self._watch(value, inner, f"{label}.{inner}", held, depth - 1)
        try:
            reference: Callable[[], Any] = weakref.ref(owner)
        except TypeError:  # of a SimpleNamespace, say, which is all that is kept alive then
            reference = partial(_itself, owner)
        kept, identity = value if is_plain(value) else _GONE, id(value) if is_opened else 0
        content = content_of(value)
        self._settings.append(_Setting(reference, name, label, kept, identity, content))

    def change(self) -> str:
        """What is another now, in one line; "" if nothing is."""
        found = next((text for s in self._settings if (text := s.change())), "")
        return found and f"{found}; {WHAT_NEXT}"

    def refuse_set(self, name: str) -> None:
        """Raises OptionError for a setting of the model itself."""
        if name in self.names:
            raise OptionError(f"{name} is a constant of the compiled program; {WHAT_NEXT}")

    def check(self) -> None:
        """Raises OptionError where something is another now."""
        if change := self.change():
            raise OptionError(change)
