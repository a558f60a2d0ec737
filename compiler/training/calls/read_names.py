"""Which attributes and globals the forward of a model reads, by what its code says.

Code is followed from `forward` and hooks to the methods, properties and functions that it names, in
torch's modules and the user's and their libraries', not in torch's functions. So a name is found
that any of it may read; names made at run time are not.
"""

import dis
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

_SETTERS = frozenset(("setattr", "delattr", "__dict__", "vars", "globals"))
_OF_FILE = ("LOAD_GLOBAL", "LOAD_NAME")
_WRITTEN = ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL")
_STARTS = ("forward", "__call__")
_OF_OBJECTS = ("__call__", "__getitem__", "__iter__", "__len__", "__enter__", "__exit__")
"""Of an object's methods with such a name, those that run where it is used."""


@dataclass
class ReadNames:
    """read: attributes that any module may read; written: those that a class writes itself while it
    runs, and has values of its own for; own: what methods of objects read, by class; files: the
    globals that may be read, by file. Of classes and files, see `shared`."""

    read: set[str] = field(default_factory=set)
    files: dict[ModuleType, set[str]] = field(default_factory=dict)
    written: dict[type, frozenset[str]] = field(default_factory=dict)
    own: dict[type, set[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> "ReadNames":
        found = cls()
        for module in model.modules():
            kind = type(module)
            hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
            own = (vars(module).get("forward"), *hooks)
            if kind in found.written and not any(own):
                continue
            members = _members(kind)
            starts = [m for name in _STARTS for m in members.get(name, ())]
            read, written = _names_of(kind, [*filter(None, own), *starts], found.files)
            found.read |= read
            found.written[kind] = found.written.get(kind, frozenset()) | written
        return found

    def shared(self, model: nn.Module) -> list[tuple[type | ModuleType, set[str]]]:
        """The classes and files of `model`'s code, and what it reads of them. What any of it writes
        is left out: a cache that forward keeps on a class, or under a name that it makes."""
        written = frozenset[str]().union(*self.written.values())
        kinds = {base for module in model.modules() for base in classes_of(type(module))}
        return [
            *((kind, self.read - written) for kind in kinds),
            *((file, names - written) for file, names in self.files.items()),
        ]

    def may_read(self, owner: Any, name: str) -> bool:
        """Of a module, or of an object that one has: also what methods of the object read."""
        kind = type(owner)
        if isinstance(owner, nn.Module):
            return name in self.read and name not in self.written[kind]
        if kind not in self.written:
            methods = (
                found
                for name, found in _members(kind).items()
                if name in _OF_OBJECTS or not name.startswith("__")
            )
            names = _names_of(kind, [method for found in methods for method in found])
            self.own[kind], self.written[kind] = names
        return (name in self.read or name in self.own[kind]) and name not in self.written[kind]


def classes_of(kind: type) -> list[type]:
    """A class and those that it inherits from, without the bases of all."""
    return [base for base in kind.__mro__ if base not in (nn.Module, object)]


def _members(kind: type) -> dict[str, list[Any]]:
    """What classes define under a name, those that are inherited from too."""
    members: dict[str, list[Any]] = {}
    for base in classes_of(kind):
        for name, member in vars(base).items():
            members.setdefault(name, []).append(member)
    return members


def _names_of(
    kind: type, starts: Iterable[Any], files: dict[ModuleType, set[str]] | None = None
) -> tuple[set[str], frozenset[str]]:
    """What code of a class reads, begun at some functions, and what it writes. files: gets the
    globals that it reads and does not write."""
    members = _members(kind)
    read: set[str] = set()
    written: set[str] = set()
    todo = list(starts)
    seen: set[int] = set()
    while todo:
        for function in _functions(todo.pop()):
            if id(function) in seen:
                continue
            seen.add(id(function))
            names = _names_in(function.__code__)
            for name in names.read - read:
                todo += members.get(name, ())
            read |= names.read
            written |= names.written
            found = {n: function.__globals__[n] for n in names.read if n in function.__globals__}
            todo += [f for f in found.values() if isinstance(f, FunctionType) and not _is_torch(f)]
            file = sys.modules.get(function.__module__ or "")
            if files is not None and file and vars(file) is function.__globals__:
                # By its own code alone: a script's variables are called as attributes are.
                files.setdefault(file, set()).update(names.of_file - names.written)
    return read, frozenset(written)


def _functions(member: Any) -> Iterator[FunctionType]:
    """The functions behind a member of a class: of a property, of what is decorated or bound."""
    todo, seen = [member], set()
    while todo:
        found = todo.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, FunctionType):
            yield found
            cells = (cell for cell in found.__closure__ or ())
            todo += [c for c in map(_content, cells) if callable(c) and not isinstance(c, type)]
        elif isinstance(found, MethodType | staticmethod | classmethod):
            todo.append(found.__func__)
        elif isinstance(found, property):
            todo.append(found.fget)
        todo += [
            vars(found)[n] for n in ("func", "__wrapped__") if n in getattr(found, "__dict__", {})
        ]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a variable without a value yet
        return None


def _is_torch(function: FunctionType) -> bool:
    return function.__module__ is not None and function.__module__.partition(".")[0] == "torch"


@dataclass(frozen=True)
class _Names:
    """of_file: globals, of what is read."""

    read: frozenset[str]
    written: frozenset[str]
    of_file: frozenset[str]


@cache
def _names_in(code: CodeType) -> _Names:
    """Of a function and those inside it: attributes, and text that may name one for getattr."""
    read: set[str] = set(code.co_names)
    written: set[str] = set()
    of_file: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _WRITTEN:
            written.add(instruction.argval)
        elif instruction.opname in _OF_FILE:
            of_file.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            read.add(constant)
            if not _SETTERS.isdisjoint(code.co_names):
                written.add(constant)
        elif isinstance(constant, CodeType):
            inner = _names_in(constant)
            read |= inner.read
            written |= inner.written
            of_file |= inner.of_file
    return _Names(frozenset(read), frozenset(written), frozenset(of_file))
