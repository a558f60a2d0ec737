"""torch.utils.checkpoint with other ways to run a call. The one file that knows what it calls."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint

from meshfold.errors import moved

_NOT_REENTRANT = "_checkpoint_without_reentrant_generator"
"""The function behind calls that are not reentrant; torch 2.14 calls one of this name and _impl."""


@contextmanager
def checkpoints_as(
    reentrant: type, on_other: Callable[[Callable[..., Any]], None]
) -> Iterator[None]:
    """A context in which `reentrant` stands in for the CheckpointFunction of torch, and calls that
    are not reentrant are plain ones, of which on_other(function) is told; not for threads side by
    side."""
    name = (
        f"{_NOT_REENTRANT}_impl"
        if hasattr(checkpoint, f"{_NOT_REENTRANT}_impl")
        else _NOT_REENTRANT
    )
    if not hasattr(checkpoint, name):  # pragma: no cover
        raise moved(name)
    before = checkpoint.CheckpointFunction, getattr(checkpoint, name)

    def plain(function: Callable[..., Any], *_: Any, **__: Any) -> Iterator[None]:
        on_other(function)
        yield

    checkpoint.CheckpointFunction = reentrant  # type: ignore[assignment,misc]
    setattr(checkpoint, name, plain)
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = before[0]  # type: ignore[misc]
        setattr(checkpoint, name, before[1])
