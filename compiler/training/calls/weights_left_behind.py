"""The weights of a model that was compiled stay as they were: the compiled model trains its own.

`torch.save(model.state_dict(), ...)` after training, of the model that was passed to
meshfold.compile, would save what training began with. So that call warns where the compiled model
has been trained and the model has not.
"""

import warnings
import weakref
from collections.abc import Mapping

from torch import nn


def watch_weights(model: nn.Module, compiled: nn.Module) -> None:
    """Has model.state_dict() warn, once, where `compiled` has been trained in its place."""
    model.register_state_dict_pre_hook(_WeightsLeftBehind(model, compiled))  # type: ignore[no-untyped-call]


class _WeightsLeftBehind:
    """A hook of state_dict. Copies of the model, and pickles, have one that does nothing."""

    def __init__(self, model: nn.Module, compiled: nn.Module) -> None:
        self._before = _versions(model)
        self._compiled = weakref.ref(compiled)
        self._compiled_before = _versions(compiled)

    def __call__(self, model: nn.Module, prefix: str, keep_vars: bool) -> None:
        compiled = self._compiled()
        if compiled is None or not self._before or _versions(model) != self._before:
            return
        now = _versions(compiled)
        if now.keys() != self._compiled_before.keys() or now == self._compiled_before:
            return
        self._before = {}
        warnings.warn(
            f"these weights of {type(model).__name__} are those from before meshfold.compile: the "
            "compiled model has been trained, with weights of its own; save compiled.state_dict(), "
            "or compiled.full_state_dict()",
            stacklevel=3,
        )

    def __reduce__(self) -> tuple[type, tuple[slice]]:
        # The class of a slice, which takes a hook's arguments: readers may have no meshfold.
        return type, (slice(None),)


def _versions(module: nn.Module) -> Mapping[str, int]:
    """How often each parameter was written to, which those made in inference mode do not know."""
    known = ((name, p) for name, p in module.named_parameters() if not p.is_inference())
    return {name: p._version for name, p in known}
