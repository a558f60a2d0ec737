"""The weights of a model that was compiled stay as they were: the compiled model trains its own.

`torch.save(model.state_dict(), ...)` after training, of the model that was passed to
meshfold.compile, would save what training began with, and `model(x)` would compute with it. So both
warn where the compiled model has been trained and the model has not.
"""

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


def watch_weights(model: nn.Module, compiled: nn.Module) -> None:
    """Has model.state_dict() and model(...) warn, each once, where `compiled` has been trained."""
    model.register_state_dict_pre_hook(_OfStateDict(model, compiled))  # type: ignore[no-untyped-call]
    model.register_forward_pre_hook(_OfForward(model, compiled))


class _LeftBehind:
    def __init__(self, model: nn.Module, compiled: nn.Module) -> None:
        self._before = _versions(model)
        self._compiled = weakref.ref(compiled)
        self._compiled_before = _versions(compiled)

    def _warn(self, model: nn.Module, mistake: str, stacklevel: int) -> None:
        compiled = self._compiled()
        if compiled is None or not self._before or _versions(model) != self._before:
            return
        now = _versions(compiled)
        if now.keys() != self._compiled_before.keys() or now == self._compiled_before:
            return
        self._before = {}
        warnings.warn(
            f"these weights of {type(model).__name__} are those from before meshfold.compile: the "
            f"compiled model has been trained, with weights of its own; {mistake}",
            stacklevel=stacklevel,
        )


class _OfStateDict(_LeftBehind):
    """A hook of state_dict. Copies of the model, and pickles, have one that does nothing."""

    def __call__(self, model: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._warn(model, "save compiled.state_dict(), or compiled.full_state_dict()", stacklevel=4)

    def __reduce__(self) -> tuple[type, tuple[slice]]:
        # The class of a slice, which takes a hook's arguments: readers may have no meshfold.
        return type, (slice(None),)


class _OfForward(_LeftBehind):
    """A hook before forward. Copies have one that gives back the arguments."""

    def __call__(self, model: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._warn(
            model,
            "call compiled(...), or load what it has: "
            "model.load_state_dict(compiled.full_state_dict())",
            stacklevel=6,
        )

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[dict[Any, Any], str]]:
        # dict.get of a dict without entries gives its second argument: those of the forward.
        return getattr, ({}, "get")


def _versions(module: nn.Module) -> Mapping[str, int]:
    """How often each parameter was written to, which those made in inference mode do not know."""
    known = ((name, p) for name, p in module.named_parameters() if not p.is_inference())
    return {name: p._version for name, p in known}
