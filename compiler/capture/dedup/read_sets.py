"""What running a module depends on besides its arguments, recorded while it runs.

A Recording watches one call of one module. It notes every instance attribute that the module or a
submodule reads (the *read set*), whether one is written, and the plain data among the globals and
class attributes of the code that ran. A module of the same build that would read equal values runs
the same ops.

Known escapes: closures, C extensions, files, the environment. The last instance of every class is
traced as well and compared, and `full_capture=True` trusts nothing.
"""

import copy
import enum
import functools
import operator
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, MethodType
from typing import Any

import torch
from torch import nn

from meshfold.capture.dedup.arguments import comparable_leaf, is_plain
from meshfold.torch_compat.fake_tensors import is_fake
from meshfold.torch_compat.source_lines import is_user_file

_INTERNAL = frozenset(vars(nn.Module()))
"""What nn.Module keeps of its own: parameters, submodules and hooks, compared as the skeleton."""

_MAX_CONTAINER = 64
"""Larger containers and tensors are tables, not state; they are compared by identity."""


class _Missing(enum.Enum):
    MISSING = enum.auto()


class _Same:
    """Equal to what wraps the same object."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def module_paths(root: nn.Module) -> dict[int, str]:
    """Paths of the modules of a tree, relative to `root`, by id; the first of several."""
    return {id(module): path for path, module in root.named_modules()}


def frozen(value: Any, paths: Mapping[int, str], depth: int = 2) -> object:
    """A copy of `value` to compare later: data by value, modules of the tree by their path, any
    other object by identity and, `depth` levels deep, by its attributes."""
    if isinstance(value, _Missing) or is_plain(value):
        return comparable_leaf(value)
    if isinstance(value, torch.Tensor):
        if is_fake(value) or value.is_meta or value.numel() > _MAX_CONTAINER:
            return _Same(value)
        return torch.Tensor, str(value.dtype), tuple(value.shape), repr(value.tolist())
    if isinstance(value, nn.Module):
        return ("module", paths[id(value)]) if id(value) in paths else _Same(value)
    if isinstance(value, MethodType):
        return "method", frozen(value.__self__, paths, 0), _Same(value.__func__)
    if isinstance(value, functools.partial):
        bound = (value.args, value.keywords)
        return "partial", frozen(value.func, paths, 0), frozen(bound, paths, depth)
    if isinstance(value, dict):
        keys = [comparable_leaf(k) if is_plain(k) else _Same(k) for k in value]
        return dict, keys, [frozen(v, paths, depth) for v in value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value), [frozen(v, paths, depth) for v in value]
    if depth and hasattr(value, "__dict__") and not callable(value):
        return _Same(value), frozen(dict(vars(value)), paths, depth - 1)
    return _Same(value)


class _Namespace:
    """The plain data of a module's globals or a class, as it was when first seen."""

    def __init__(self, label: str, namespace: Mapping[str, Any], owner: type | None) -> None:
        self.label = label
        self.namespace = namespace
        self.owner = owner
        self.size = len(namespace)
        data = dict(self._data())
        self.names, self.values = tuple(data), tuple(data.values())
        self.contents = [(v, _content_ids(v)) for v in self.values if not is_plain(v)]
        self.copies = {name: copy.copy(value) for name, value in data.items()}

    def _data(self) -> Iterator[tuple[str, Any]]:
        for name, value in self.namespace.items():
            small = isinstance(value, (list, dict, set)) and len(value) <= _MAX_CONTAINER
            if not name.startswith("__") and (small or is_plain(value)):
                yield name, value

    def _state(self) -> dict[str, object]:
        return {name: frozen(value, {}, 0) for name, value in self._data()}

    def changes(self) -> list[str]:
        """Names whose value is another now."""
        # Asked for every call and every namespace, so first the cheap way: the same objects.
        if (
            len(self.namespace) == self.size
            and all(map(operator.is_, map(self.namespace.get, self.names), self.values))
            and all(_content_ids(value) == ids for value, ids in self.contents)
        ):
            return []
        before = {name: frozen(value, {}, 0) for name, value in self.copies.items()}
        after = self._state()
        return [n for n in {**before, **after} if after.get(n) != before.get(n)]

    def restore(self) -> None:
        """Give what changed its old value back. New names stay."""
        for name in self.changes():
            if name in self.copies and self.owner is not None:
                setattr(self.owner, name, copy.copy(self.copies[name]))
            elif name in self.copies:
                assert isinstance(self.namespace, dict)
                self.namespace[name] = copy.copy(self.copies[name])


def _content_ids(container: Any) -> tuple[object, ...]:
    """Identities of all that a container holds, containers inside it too."""
    items = [*container, *container.values()] if isinstance(container, dict) else [*container]
    inner = [v for v in items if isinstance(v, (list, dict, set))]
    return *map(id, items), *map(_content_ids, inner)


class Recording:
    """Read set of one call of `root`."""

    def __init__(self, root: nn.Module) -> None:
        self.paths = module_paths(root)
        self.reads: dict[tuple[str, str], object] = {}
        self.problems: list[str] = []
        self.namespaces: dict[int, _Namespace] = {}

    def saw(self, module: nn.Module, name: str, value: object) -> None:
        path = self.paths.get(id(module))
        if path is not None and (path, name) not in self.reads:
            self.reads[path, name] = frozen(value, self.paths)

    def saw_problem(self, module: nn.Module, text: str) -> None:
        if id(module) in self.paths:
            self.problems.append(text)

    def saw_globals(self, label: str, namespace: Mapping[str, Any]) -> None:
        if id(namespace) not in self.namespaces:
            self.namespaces[id(namespace)] = _Namespace(label, namespace, None)

    def saw_type(self, owner: type) -> None:
        if id(owner) not in self.namespaces:
            self.namespaces[id(owner)] = _Namespace(owner.__name__, vars(owner), owner)

    def finish(self) -> None:
        """Note the globals and class attributes that the call changed."""
        for space in self.namespaces.values():
            self.problems += [f"{space.label}.{name} is changed" for name in space.changes()]

    def restore(self) -> None:
        """Give globals and class attributes the values from before the call."""
        for space in self.namespaces.values():
            space.restore()

    def difference(self, root: nn.Module) -> str:
        """What `root` would read otherwise now, or which global is another now; "" if nothing."""
        paths = module_paths(root)
        modules = dict(root.named_modules(remove_duplicate=False))
        for (path, name), value in self.reads.items():
            if frozen(getattr(modules[path], name, _Missing.MISSING), paths) != value:
                return f"{path}.{name}" if path else name
        for space in self.namespaces.values():
            for name in space.changes():
                return f"{space.label}.{name}"
        return ""


class Recorder:
    """Feeds the recordings under way. Modules of a watched tree get a subclass of their own class
    that reports reads and writes, and give it back afterwards."""

    def __init__(self) -> None:
        self.active: list[Recording] = []
        self.types: dict[type, type] = {}

    @contextmanager
    def recording(self, root: nn.Module) -> Iterator[Recording]:
        profiler = sys.getprofile()
        if profiler not in (None, self._saw_call):
            raise RuntimeError("a Python profiler is active, so globals cannot be watched")
        record = Recording(root)
        before = {m: type(m) for m in root.modules() if type(m) not in self.types.values()}
        for base in dict.fromkeys(type(m) for m in root.modules()):
            for owner in base.__mro__[: base.__mro__.index(nn.Module)]:
                record.saw_type(owner)
        try:
            for module, base in before.items():
                module.__class__ = self._recording_type(base)
            self.active.append(record)
            sys.setprofile(self._saw_call)
            yield record
        finally:
            sys.setprofile(profiler)
            if record in self.active:
                self.active.remove(record)
            for module, base in before.items():
                module.__class__ = base
            record.finish()

    def adopt(self, recording: Recording) -> None:
        """Running calls depend on what a call did that now is not repeated."""
        for record in self.active:
            for key, space in recording.namespaces.items():
                record.namespaces.setdefault(key, space)

    def _saw_call(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and is_user_file(frame.f_code.co_filename):
            label = str(frame.f_globals.get("__name__", frame.f_code.co_filename))
            for record in self.active:
                record.saw_globals(label, frame.f_globals)

    def saw_attribute(self, module: nn.Module, name: str, value: object) -> None:
        if name not in _INTERNAL:
            for record in self.active:
                record.saw(module, name, value)

    def saw_problem(self, module: nn.Module, text: str) -> None:
        for record in self.active:
            record.saw_problem(module, text)

    def _recording_type(self, base: type) -> type:
        if base not in self.types:
            self.types[base] = _make_recording_type(base, self)
        return self.types[base]


def _make_recording_type(base: Any, recorder: Recorder) -> type:
    class Recorded(base):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            own = object.__getattribute__(self, "__dict__")
            try:
                value = super().__getattribute__(name)
            except AttributeError:
                stores = ("_parameters", "_buffers", "_modules")
                if not any(name in own.get(store, ()) for store in stores):
                    recorder.saw_attribute(self, name, _Missing.MISSING)
                raise
            if name in own:
                recorder.saw_attribute(self, name, value)
            elif name == "__dict__" and is_user_file(sys._getframe(1).f_code.co_filename):
                recorder.saw_problem(self, f"{base.__name__} reads its own __dict__")
            return value

        def __setattr__(self, name: str, value: Any) -> None:
            recorder.saw_problem(self, f"{base.__name__}.{name} is written")
            super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            recorder.saw_problem(self, f"{base.__name__}.{name} is deleted")
            super().__delattr__(name)

    Recorded.__name__, Recorded.__qualname__ = base.__name__, base.__qualname__
    Recorded.__module__ = base.__module__
    return Recorded
