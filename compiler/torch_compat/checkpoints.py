"""torch.utils.checkpoint with other ways to run a call. The one file that knows what it calls."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import checkpoint

from meshfold.errors import MeshfoldError

_NOT_REENTRANT = "_checkpoint_without_reentrant_generator"


@contextmanager
def checkpoints_as(
    reentrant: type, on_other: Callable[[Callable[..., Any]], None]
) -> Iterator[None]:
    """A context in which `reentrant` stands in for the CheckpointFunction of torch, and calls that
    are not reentrant are plain ones, of which on_other(function) is told; not for threads side by
    side."""
    if not hasattr(checkpoint, _NOT_REENTRANT):  # pragma: no cover
        raise MeshfoldError(
            f"torch {torch.__version__} moved {_NOT_REENTRANT}; use torch 2.11 to 2.13"
        )
    before = checkpoint.CheckpointFunction, getattr(checkpoint, _NOT_REENTRANT)

    def plain(function: Callable[..., Any], *_: Any, **__: Any) -> Iterator[None]:
        on_other(function)
        yield

    checkpoint.CheckpointFunction = reentrant  # type: ignore[assignment,misc]
    setattr(checkpoint, _NOT_REENTRANT, plain)
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = before[0]  # type: ignore[misc]
        setattr(checkpoint, _NOT_REENTRANT, before[1])
