"""Children of a model that may be equal: which to look at, what they are built of, how to step in.

Every child of a ModuleList, Sequential or ModuleDict with MIN_SUBMODULES modules or more counts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from meshfold.capture.python_state.class_writes import take_name, writes_to
from meshfold.capture.trace.tensor_facts import tensor_facts

MIN_SUBMODULES = 4

_CHILD = "_meshfold_child"


@dataclass(frozen=True)
class Child:
    """A wrapped child. `skeleton` is equal for children of the same build."""

    scope: str
    module: nn.Module
    skeleton: int


class Session(Protocol):
    """What a wrapped child asks when it is called."""

    def on_call(self, child: Child, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...


def find_children(fake: nn.Module) -> list[Child]:
    """Children of containers that are large enough to be worth a class, each once."""
    names: dict[int, list[str]] = {}
    for name, tensor in (
        *fake.named_parameters(remove_duplicate=False),
        *fake.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), []).append(name)
    skeletons: dict[object, int] = {}
    children: dict[int, Child] = {}
    for path, container in fake.named_modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            continue
        for name, module in container.named_children():
            if id(module) in children or sum(1 for _ in module.modules()) < MIN_SUBMODULES:
                continue
            scope = f"{path}.{name}" if path else name
            shape = _skeleton(module, scope, names)
            number = skeletons.setdefault(shape, len(skeletons))
            children[id(module)] = Child(scope, module, number)
    return list(children.values())


def _skeleton(root: nn.Module, scope: str, names: Mapping[int, list[str]]) -> object:
    """Everything about a module tree that is no attribute: types, names, tensors, ties, hooks."""
    first: dict[int, str] = {}
    modules: list[object] = []
    for path, module in root.named_modules(remove_duplicate=False):
        if id(module) in first:
            modules.append((path, first[id(module)]))
            continue
        first[id(module)] = path
        tensors = tuple(
            (name, _tensor_skeleton(tensor, scope, names))
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
        )
        hooks = (module._forward_hooks, module._forward_pre_hooks)
        hook_ids = tuple(id(f) for table in hooks for f in table.values())
        unsaved = tuple(sorted(module._non_persistent_buffers_set))
        modules.append((path, type(module), module.training, tensors, hook_ids, unsaved))
    return tuple(modules)


def _tensor_skeleton(
    tensor: torch.Tensor | None, scope: str, names: Mapping[int, list[str]]
) -> object:
    """What a tensor is, and its ties: its names inside the scope, and which tensor it is if it has
    a name outside."""
    if tensor is None:
        return None
    own = tuple(n.removeprefix(scope + ".") for n in names[id(tensor)] if n.startswith(scope + "."))
    outside = names[id(tensor)][0] if len(own) < len(names[id(tensor)]) else None
    return type(tensor), tensor_facts(tensor), tensor.requires_grad, own, outside


@contextmanager
def wrapped(children: Sequence[Child], session: Session) -> Iterator[None]:
    """Route the calls of `children` through `session`: each gets a subclass of its own class, and
    its class back afterwards. (The export tracer calls stand-ins that share attributes and class
    with the module, so the child is found by attribute, not by identity.)"""
    types: dict[type, type] = {}
    before = [(child.module, type(child.module)) for child in children]
    try:
        for child in children:
            base = type(child.module)
            if base not in types:
                types[base] = _asking_type(base, session)
            vars(child.module)[_CHILD] = child
            child.module.__class__ = types[base]
        yield
    finally:
        for module, base in before:
            module.__class__ = base
            vars(module).pop(_CHILD, None)


def _asking_type(base: Any, session: Session) -> type:
    class Asking(base, metaclass=writes_to(base)):  # type: ignore[misc, metaclass]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            child = object.__getattribute__(self, "__dict__")[_CHILD]
            return session.on_call(child, super().forward, args, kwargs)

    take_name(Asking, base)
    return Asking
