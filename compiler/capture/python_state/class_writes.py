"""Classes that stand in for those of modules: what code writes to them arrives at the class of the
user."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from meshfold.capture.python_state.snapshots import is_of_user

_MADE = "__meshfold_made__"


def writes_to(base: Any, seen: Callable[[str], None] = lambda name: None) -> Any:
    """The metaclass of a class that stands in for `base`: what code writes to the class of its
    module (`type(self).steps = ...`) is written to `base`, where everyone else reads it. seen(name)
    is told of it. What `__init_subclass__` writes belongs to the class that is being made."""

    class StandIn(type(base)):  # type: ignore[misc]
        def __init__(cls, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            type.__setattr__(cls, _MADE, True)

        def __setattr__(cls, name: str, value: Any) -> None:
            if _is_of_python(name) or _MADE not in vars(cls):
                type.__setattr__(cls, name, value)
                return
            seen(name)
            setattr(base, name, value)

        def __delattr__(cls, name: str) -> None:
            seen(name)
            delattr(base, name)

    return StandIn


def _is_of_python(name: str) -> bool:
    """Whether Python keeps something under the name in a class, and not a user."""
    return name.startswith("__") or name == "_abc_impl"


def take_name(stand_in: type, base: type) -> None:
    """Let a class that stands in for `base` print as it does."""
    for name in ("__name__", "__qualname__", "__module__"):
        type.__setattr__(stand_in, name, getattr(base, name))


@contextmanager
def written_through(model: nn.Module) -> Iterator[None]:
    """Where modules have several names, let what they write to their classes arrive there: an
    export calls stand-ins then, each of a class of its own that is made from the module's."""
    modules = [module for _, module in model.named_modules(remove_duplicate=False)]
    before = [(module, type(module)) for module in {id(m): m for m in modules}.values()]
    types: dict[type, type] = {}
    if len(before) == len(modules):
        before = []
    try:
        for module, base in before:
            if is_of_user(base):
                if base not in types:
                    types[base] = writes_to(base)(base.__name__, (base,), {})
                    take_name(types[base], base)
                module.__class__ = types[base]
        yield
    finally:
        for module, base in before:
            module.__class__ = base
