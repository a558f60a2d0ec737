"""The end of a backward that is running, and when torch.autograd.graph.saved_tensors_hooks are
entered. The one file that knows autograd's engine and how it keeps such hooks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import graph

from meshfold.errors import MeshfoldError

Hook = Callable[[Any], Any]


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have `call` run when the backward that runs now is over. To be called inside of one."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    queue = getattr(engine, "queue_callback", None)
    if queue is None:  # pragma: no cover
        raise MeshfoldError(
            f"torch {torch.__version__} moved queue_callback; use torch 2.11 to 2.13"
        )
    queue(call)


@contextmanager
def saved_tensor_hooks_met(on_enter: Callable[[Hook, Hook], None]) -> Iterator[None]:
    """A context in which on_enter(pack, unpack) is called before such hooks are in force; not for
    threads side by side."""
    plain = graph.saved_tensors_hooks.__enter__

    def enter(hooks: graph.saved_tensors_hooks) -> None:
        on_enter(hooks.pack_hook, hooks.unpack_hook)
        plain(hooks)

    graph.saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        graph.saved_tensors_hooks.__enter__ = plain  # type: ignore[method-assign]
