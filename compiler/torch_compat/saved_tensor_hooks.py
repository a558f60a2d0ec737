"""When torch.autograd.graph.saved_tensors_hooks are entered. The one file that knows how."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd import graph

Hook = Callable[[Any], Any]


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
