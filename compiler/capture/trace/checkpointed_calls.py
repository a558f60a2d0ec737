"""Calls under torch.utils.checkpoint are captured as plain calls: the plan decides what is
recomputed, and says what the model itself asks for.

The reentrant form runs in a torch.autograd.Function, whose backward a graph would lose.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.torch_compat.checkpoints import checkpoints_as


class CheckpointedCalls:
    """What a model asks to be recomputed, as it is met: classes of modules, names of functions."""

    def __init__(self) -> None:
        self._met: dict[str, None] = {}

    def meet(self, function: Callable[..., Any]) -> None:
        self._met[_name_of(function)] = None

    @property
    def names(self) -> tuple[str, ...]:
        """Each once, in order."""
        return tuple(self._met)

    @property
    def note(self) -> str:
        """One line for the user, "" if nothing was met."""
        return (
            f"the model asks for recomputation of {', '.join(self._met)} (torch.utils.checkpoint): "
            "the plan chooses what is recomputed; keep_checkpointing=True recomputes all"
            if self._met
            else ""
        )


def _name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__self__", function)
    if isinstance(owner, nn.Module):
        return type(owner).__name__
    name = getattr(function, "__qualname__", type(function).__name__)
    return str(name).replace("<locals>.", "")


@contextmanager
def plain_checkpoints() -> Iterator[CheckpointedCalls]:
    """A context in which checkpoints are plain calls, and noted; not for threads side by side."""
    calls = CheckpointedCalls()

    class PlainCall:
        """Stands in for the CheckpointFunction of torch."""

        @staticmethod
        def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
            """Without an argument that requires a gradient no gradient comes back, as in torch."""
            calls.meet(function)
            has_gradient = any(isinstance(a, Tensor) and a.requires_grad for a in args)
            with torch.set_grad_enabled(has_gradient and torch.is_grad_enabled()):
                return function(*args)

    with checkpoints_as(PlainCall, calls.meet):
        yield calls
