"""What running a module depends on besides its arguments, recorded while it runs.

A Recording watches one call of one module. It notes every instance attribute that the module or a
submodule reads (the *read set*) and those of modules elsewhere, whether one is written, and what
the code that ran shares with other modules: globals, classes, closures, context variables
(meshfold.capture.python_state.snapshots). A module of the same build that would read equal values
runs the same ops. A table in which each module has an entry of its own is refused: one content,
read at other places.

Known escapes: C extensions, files, the environment. The last instance of every class is traced as
well and compared, and `full_capture=True` trusts nothing.
"""

import enum
import functools
import sys
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from types import FrameType, MethodType
from typing import Any

import torch
from torch import nn

from meshfold.capture.dedup.arguments import comparable_leaf, is_plain
from meshfold.capture.python_state.class_writes import take_name, writes_to
from meshfold.capture.python_state.snapshots import Snapshot
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


class Recording:
    """Read set of one call of `root`. `identities`: ids of all modules and tensors of the model."""

    def __init__(self, root: nn.Module, identities: Set[int]) -> None:
        self.paths = module_paths(root)
        self.identities = identities
        self.reads: dict[tuple[str, str], object] = {}
        self.outside: dict[tuple[int, str], tuple[nn.Module, object]] = {}
        self.problems: list[str] = []
        self.spaces: dict[int, Snapshot] = {}
        self.see_context()

    def see_context(self) -> None:
        """Context variables are compared from here on: an export has values of its own."""
        self.spaces[0] = Snapshot({}, context=True)

    def saw(self, module: nn.Module, name: str, value: object) -> None:
        path = self.paths.get(id(module))
        if path is not None and (path, name) not in self.reads:
            self.reads[path, name] = frozen(value, self.paths)
        elif path is None and (id(module), name) not in self.outside:
            self.outside[id(module), name] = module, frozen(value, self.paths)
        else:
            return
        if isinstance(value, Iterator):
            self.problems.append(f"{type(module).__name__}.{name} is an iterator")
        elif Snapshot({name: {name: value}}).table_of(self.identities):
            self.problems.append(f"{type(module).__name__}.{name} has an entry per module")

    def saw_space(self, label: str, space: Mapping[str, Any] | type) -> None:
        """The globals of a file or a class whose code runs."""
        if id(space) not in self.spaces:
            self.spaces[id(space)] = Snapshot({label: space})

    def finish(self) -> None:
        """Note what the call changed that modules share, and tables in which each has a place."""
        for space in self.spaces.values():
            self.problems += [f"{name} is changed" for name in space.changes()]
            if table := space.table_of(self.identities):
                self.problems.append(f"{table} has an entry per module")

    def restore(self) -> None:
        """Give what modules share the values from before the call."""
        for space in self.spaces.values():
            space.restore()

    def difference(self, root: nn.Module) -> str:
        """What `root` would read otherwise now, or which global is another now; "" if nothing."""
        paths = module_paths(root)
        modules = dict(root.named_modules(remove_duplicate=False))
        for (path, name), value in self.reads.items():
            if frozen(getattr(modules[path], name, _Missing.MISSING), paths) != value:
                return f"{path}.{name}" if path else name
        for (_, name), (module, value) in self.outside.items():
            if frozen(getattr(module, name, _Missing.MISSING), paths) != value:
                return f"{type(module).__name__}.{name}"
        return next(filter(None, (space.change() for space in self.spaces.values())), "")


class Recorder:
    """Feeds the recordings under way. Every module of the model gets a subclass of its own class
    that reports reads and writes, and gives it back afterwards."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.active: list[Recording] = []
        self.types: dict[type, type] = {}
        tensors = (*model.parameters(), *model.buffers())
        self.identities = frozenset(map(id, (*model.modules(), *tensors)))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The time of a run of the model."""
        before = {m: type(m) for m in self.model.modules()}
        try:
            for module, base in before.items():
                module.__class__ = self._recording_type(base)
            yield
        finally:
            for module, base in before.items():
                module.__class__ = base

    @contextmanager
    def recording(self, root: nn.Module) -> Iterator[Recording]:
        """The time of a call of `root` while it is watched."""
        profiler = sys.getprofile()
        if profiler not in (None, self._saw_call):
            raise RuntimeError("a Python profiler is active, so globals cannot be watched")
        record = Recording(root, self.identities)
        for base in dict.fromkeys(type(m) for m in root.modules()):
            for owner in base.__mro__[: base.__mro__.index(nn.Module)]:
                record.saw_space(owner.__name__, owner)
        try:
            self.active.append(record)
            sys.setprofile(self._saw_call)
            yield record
        finally:
            sys.setprofile(profiler)
            if record in self.active:
                self.active.remove(record)
            record.finish()

    def adopt(self, recording: Recording) -> None:
        """Running calls depend on what a call did that now is not repeated."""
        for record in self.active:
            for key, space in recording.spaces.items():
                record.spaces.setdefault(key, space)  # its own context stays

    def _saw_call(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and is_user_file(frame.f_code.co_filename):
            # What a file that is being imported has by now is no state to go back to.
            if getattr(frame.f_globals.get("__spec__"), "_initializing", False):
                return
            label = str(frame.f_globals.get("__name__", frame.f_code.co_filename))
            for record in self.active:
                record.saw_space(label, frame.f_globals)

    def saw_attribute(self, module: nn.Module, name: str, value: object) -> None:
        if name not in _INTERNAL:
            for record in self.active:
                record.saw(module, name, value)

    def saw_problem(self, text: str) -> None:
        for record in self.active:
            record.problems.append(text)

    def _recording_type(self, base: type) -> type:
        if base not in self.types:
            self.types[base] = _make_recording_type(base, self)
        return self.types[base]


def _make_recording_type(base: Any, recorder: Recorder) -> type:
    def seen(name: str) -> None:
        recorder.saw_problem(f"{base.__name__}.{name} of the class is written")

    class Recorded(base, metaclass=writes_to(base, seen)):  # type: ignore[misc, metaclass]
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
                recorder.saw_problem(f"{base.__name__} reads its own __dict__")
            return value

        def __setattr__(self, name: str, value: Any) -> None:
            recorder.saw_problem(f"{base.__name__}.{name} is written")
            super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            recorder.saw_problem(f"{base.__name__}.{name} is deleted")
            super().__delattr__(name)

    take_name(Recorded, base)
    return Recorded
