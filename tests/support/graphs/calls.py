"""One-op graphs by name and arguments."""

from collections.abc import Callable
from typing import Any

from support.graphs.ops import SingleOp

X = (4, 12, 24)
Sample = tuple[str, Callable[[], SingleOp]]


def call(target: str, *args: Any, **kwargs: Any) -> Sample:
    """A sample whose arguments may be functions that make tensors."""
    return target, lambda: SingleOp(f"aten.{target}", *args, **kwargs)
