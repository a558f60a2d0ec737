"""Snapshots: what containers, objects, closures and context variables held at one time.

A Snapshot starts at roots (the attributes of modules, the globals of a file, a class) and follows
what can hold state: containers, a user's objects, functions with their closures, defaults and
caches. Contents are compared by identity first, plain data and containers then by value, so writing
an equal value is no change.
"""

import contextvars
import functools
import itertools
import sys
import threading
import types
import weakref
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from operator import is_
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from meshfold.capture.python_state.arrays import array_content, write_array
from meshfold.torch_compat.global_hooks import hook_tables
from meshfold.torch_compat.source_lines import is_user_file

_ATOMS = frozenset(
    (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
)
_HOLDERS = (
    types.SimpleNamespace,
    threading.local,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
    UserDict,
    UserList,
)
"""Classes of the standard library whose objects are opened as those of a user are."""

_OWN_OF_TYPES = frozenset(("__dict__", "__weakref__", "__abstractmethods__", "_abc_impl"))
OWN_OF_MODULES = frozenset(vars(nn.Module()))
_FOLLOWED = ("_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")
_DEPTH = 7
_DEPTH_OF_SHARED = 5
_MOST = 64

Content = tuple[tuple[Any, ...], tuple[Any, ...]]
"""Keys and values."""
Label = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Held:
    """One thing that holds state, and what it held. `read` gives what it holds now."""

    label: Label
    owner: Any
    read: "_Reader"
    content: Content


class Snapshot:
    """`roots` by name: mappings (globals, vars of a module), classes, objects, functions. Modules
    are not entered from elsewhere: name their vars."""

    def __init__(self, roots: Mapping[str, Any], *, context: bool = False) -> None:
        self._held: list[_Held] = []
        self._caches: list[_Held] = []
        self._seen: set[int] = set()
        self._readers: dict[type, _Reader | None] = {}
        if context:
            self._hold(("context variable",), None, _context, _DEPTH)
        for name, root in roots.items():
            if isinstance(root, type):
                self._hold((name,), root, _class_attributes, _DEPTH_OF_SHARED)
            elif isinstance(root, dict):
                read = _root_reader(root)
                self._hold((name,), root, read, _DEPTH_OF_SHARED if read is _globals else _DEPTH)
            else:
                self._follow((name,), root, _DEPTH)

    def _follow(self, label: Label, value: Any, depth: int) -> None:
        if not depth or id(value) in self._seen:
            return
        kind = type(value)
        if kind not in self._readers:
            self._readers[kind] = _reader(kind)
        read = self._readers[kind]
        if read is not None:
            self._seen.add(id(value))
            self._hold(label, value, read, depth)

    def _hold(self, label: Label, owner: Any, read: "_Reader", depth: int) -> None:
        content = read(owner)
        if read is _cached_calls:
            self._caches.append(_Held(label, owner, read, content))
        elif read not in _FIXED and type(owner) not in (tuple, frozenset):
            self._held.append(_Held(label, owner, read, content))
        keys, values = content
        if len(values) > _MOST and len(label) > 1:
            return
        for k, inner in enumerate(values):
            if type(inner) not in _ATOMS:
                self._follow((*label, _name(keys[k]) if keys else str(k)), inner, depth - 1)

    def changes(self) -> Iterator[str]:
        """What holds something else now, by name. That a function has cached one more call is no
        change: with the same arguments it gives the same."""
        for held in self._held:
            now = held.read(held.owner)
            if not _identical(held.content, now):
                yield from _differences(held.label, held.content, now)

    def change(self) -> str:
        """The first of the changes, "" if there is none."""
        return next(self.changes(), "")

    def restore(self) -> None:
        """Put back what was held. What cannot be put back (the version of a tensor) stays."""
        for held in (*self._held, *self._caches):
            if not _identical(held.content, held.read(held.owner)):
                _write(held.owner, held.read, held.content)

    def table_of(self, identities: Set[int]) -> str:
        """The first dict or set that has an entry for one of `identities`, ids of objects."""
        for held in self._held:
            if isinstance(held.owner, (dict, set)):
                entries = held.content[0] or held.content[1]
                if any(_identity(entry) in identities for entry in entries):
                    return _text(held.label)
        return ""


def _name(key: Any) -> str:
    """Of an entry, for messages. Not every key can be printed cheaply."""
    if isinstance(key, contextvars.ContextVar):
        return key.name
    return str(key) if isinstance(key, (str, int)) else type(key).__name__


def _text(label: Label) -> str:
    return ".".join(filter(None, label))


def _identity(key: Any) -> int:
    if isinstance(key, weakref.ref):
        key = key()
    return key if type(key) is int else id(key)


def attributes_of(model: nn.Module) -> dict[str, Any]:
    """Roots of a snapshot: the attributes of every module, and the versions of its tensors."""
    # vars() would ask a module that reports what is read.
    return {path: object.__getattribute__(m, "__dict__") for path, m in model.named_modules()}


def shared_state(model: nn.Module) -> dict[str, Any]:
    """Roots of a snapshot: what all modules of the model share, its classes and the globals of
    their files, and torch's hooks of all modules."""
    roots: dict[str, Any] = dict(hook_tables())
    for kind in dict.fromkeys(c for m in model.modules() for c in type(m).__mro__):
        if is_of_user(kind):
            roots[f"{kind.__module__}.{kind.__qualname__}"] = kind
            roots[kind.__module__] = vars(sys.modules[kind.__module__])
    return roots


# Comparing.


def _identical(old: Content, new: Content) -> bool:
    (keys, values), (new_keys, new_values) = old, new
    return (
        len(keys) == len(new_keys)
        and len(values) == len(new_values)
        and all(map(is_, values, new_values))
        and all(map(is_, keys, new_keys))
    )


def _differences(label: Label, old: Content, new: Content) -> Iterator[str]:
    (keys, values), (new_keys, new_values) = old, new
    if not keys and not new_keys:
        if len(values) != len(new_values) or not all(map(_equal, values, new_values)):
            yield _text(label)
        return
    before = {_Key(k): v for k, v in zip(keys, values, strict=True)}
    after = {_Key(k): v for k, v in zip(new_keys, new_values, strict=True)}
    for key in {**before, **after}:
        if key not in before or key not in after or not _equal(before[key], after[key]):
            yield _text((*label, _name(key.key)))


class _Key:
    """A key of a dict: a plain one by value, any other by identity, as its own __eq__ may cost."""

    def __init__(self, key: Any) -> None:
        self.key = key
        self.plain = (type(key), key) if type(key) in _ATOMS else id(key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.plain == other.plain

    def __hash__(self) -> int:
        return hash(self.plain)


def _equal(old: Any, new: Any) -> bool:
    """Plain data and containers by value, anything else by identity."""
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if type(old) in _ATOMS:
        return bool(old == new)
    if isinstance(old, MethodType):
        return old.__self__ is new.__self__ and old.__func__ is new.__func__
    if isinstance(old, dict):
        return next(_differences((), _entries(old), _entries(new)), None) is None
    if isinstance(old, (list, tuple, deque, set, frozenset)):
        return len(old) == len(new) and all(map(_equal, old, new))
    return False


# What a thing holds: a reader per kind of thing.


def _entries(owner: dict[Any, Any]) -> Content:
    return tuple(owner), tuple(owner.values())


def _globals(owner: dict[str, Any]) -> Content:
    """Without what Python keeps there: the builtins are another matter, and an export patches
    them."""
    return _entries({name: x for name, x in owner.items() if not name.startswith("__")})


def _module(owner: dict[str, Any]) -> Content:
    """Without torch's own tables, but for tensors, whose versions change, and hooks, which keep
    things. (That tables grow is seen by meshfold.capture.dedup.structure.)"""
    found = {name: x for name, x in owner.items() if name not in OWN_OF_MODULES}
    found.update((name, owner[name]) for name in _FOLLOWED if owner[name])
    return _entries(found)


def _root_reader(root: dict[str, Any]) -> "_Reader":
    if "__builtins__" in root:
        return _globals
    return _module if root.keys() >= OWN_OF_MODULES else _entries


def _items(owner: Iterable[Any]) -> Content:
    return (), tuple(owner)


def _attributes(owner: Any) -> Content:
    own = dict(getattr(owner, "__dict__", ()))
    slots = [name for c in type(owner).__mro__ for name in getattr(c, "__slots__", ())]
    own.update((name, getattr(owner, name)) for name in slots if hasattr(owner, name))
    return _entries(own)


def _class_attributes(owner: type) -> Content:
    return _entries({k: v for k, v in vars(owner).items() if k not in _OWN_OF_TYPES})


def _function(owner: FunctionType) -> Content:
    """Its closure and defaults, which keep what they are given from call to call."""
    if not is_user_file(owner.__code__.co_filename):
        return (), ()
    cells, defaults = owner.__closure__ or (), owner.__defaults__ or ()
    return (), (*cells, *defaults, owner.__kwdefaults__, vars(owner))


def _cell(owner: CellType) -> Content:
    try:
        return (), (owner.cell_contents,)
    except ValueError:  # empty
        return (), ()


def _cached_calls(owner: Any) -> Content:
    return (), (owner.cache_info().misses, owner.__wrapped__)


def _method(owner: MethodType) -> Content:
    return (), (owner.__self__, owner.__func__)


def _partial(owner: Any) -> Content:
    return (), (owner.func, owner.args, owner.keywords)


def _count(owner: Any) -> Content:
    return (), (repr(owner),)


def _array(owner: Any) -> Content:
    return (), array_content(owner)


def _version(owner: torch.Tensor) -> Content:
    return (), () if owner.is_inference() else (owner._version,)


def _context(_: None) -> Content:
    current = contextvars.copy_context()
    return tuple(current), tuple(current.values())


_Reader = Callable[[Any], Content]

_READERS: tuple[tuple[Any, _Reader], ...] = (
    (dict, _entries),
    ((list, tuple, set, frozenset, deque), _items),
    (FunctionType, _function),
    (MethodType, _method),
    (CellType, _cell),
    (functools.partial, _partial),
    (functools._lru_cache_wrapper, _cached_calls),
    (itertools.count, _count),
    (np.ndarray, _array),
    (torch.Tensor, _version),
    (_HOLDERS, _attributes),
)


_FIXED = (_function, _method, _partial)


def _reader(kind: type) -> _Reader | None:
    """None for what holds no state that is followed: plain data, modules, classes, handles."""
    # By hand: abstract classes answer issubclass by asking all of their subclasses.
    bases = kind.__mro__
    if kind in _ATOMS or any(base in bases for base in (nn.Module, ModuleType, type)):
        return None
    for kinds, read in _READERS:
        if any(base in bases for base in (kinds if isinstance(kinds, tuple) else (kinds,))):
            return read
    return _attributes if is_of_user(kind) else None


def is_of_user(kind: type) -> bool:
    """Whether a class is neither of torch nor of meshfold nor of Python itself."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and is_user_file(file)


# Putting back.


def _write(owner: Any, read: _Reader, content: Content) -> None:
    keys, values = content
    if read is _context:
        for variable, value in zip(keys, values, strict=True):
            variable.set(value)
    elif read is _class_attributes:
        _write_class(owner, dict(zip(keys, values, strict=True)))
    elif read in (_entries, _globals, _module):
        shown = set(read(owner)[0]) - (OWN_OF_MODULES if read is _module else set())
        if read is _globals:  # a submodule that was imported meanwhile stays one
            shown -= {k for k, x in owner.items() if isinstance(x, ModuleType)} - set(keys)
        hidden = [key for key in owner if key not in shown and key not in keys]
        _write_dict(owner, (*keys, *hidden), (*values, *map(owner.get, hidden)))
    elif read is _attributes and hasattr(owner, "__dict__"):
        _write_dict(vars(owner), keys, values)
    elif read is _cell and values:
        owner.cell_contents = values[0]
    elif read is _cached_calls:
        owner.cache_clear()
    elif isinstance(owner, (list, deque, set)):
        owner.clear()
        (owner.update if isinstance(owner, set) else owner.extend)(values)
    elif read is _array and owner.flags.writeable:
        write_array(owner, values)


def _write_class(owner: type, attributes: Mapping[str, Any]) -> None:
    for name in vars(owner).keys() - attributes.keys() - _OWN_OF_TYPES:
        delattr(owner, name)
    for name, value in attributes.items():
        if vars(owner).get(name) is not value:
            setattr(owner, name, value)


def _write_dict(owner: dict[Any, Any], keys: tuple[Any, ...], values: tuple[Any, ...]) -> None:
    """Entry by entry: others may read the globals of a file at any time."""
    # Classes of a user may write something else than they are told.
    kind: Any = OrderedDict if isinstance(owner, OrderedDict) else dict
    kept = set(map(id, keys))
    for key in [key for key in owner if id(key) not in kept]:
        kind.__delitem__(owner, key)
    for key, value in zip(keys, values, strict=True):
        kind.__setitem__(owner, key, value)
