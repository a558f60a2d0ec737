"""Calls under torch.utils.checkpoint are captured as plain calls: the plan decides what is
recomputed.

The reentrant form runs in a torch.autograd.Function, whose backward a graph would lose.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint


class _PlainCall:
    """Stands in for the CheckpointFunction of torch."""

    @staticmethod
    def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        """Without an argument that requires a gradient no gradient comes back, as in torch."""
        has_gradient = any(isinstance(a, Tensor) and a.requires_grad for a in args)
        with torch.set_grad_enabled(has_gradient and torch.is_grad_enabled()):
            return function(*args)


@contextmanager
def plain_checkpoints() -> Iterator[None]:
    """A context in which reentrant checkpoints are plain calls; not for threads side by side."""
    function = checkpoint.CheckpointFunction
    checkpoint.CheckpointFunction = _PlainCall  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = function  # type: ignore[misc]
