"""Edges of autograd's graph, the end of a backward that is running, and when
torch.autograd.graph.saved_tensors_hooks are entered. The one file that knows autograd's engine and
how it keeps such hooks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph
from torch.autograd.graph import GradientEdge

from meshfold.errors import moved

Hook = Callable[[Any], Any]


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have `call` run when the backward that runs now is over. To be called inside of one."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    queue = getattr(engine, "queue_callback", None)
    if queue is None:  # pragma: no cover
        raise moved("queue_callback")
    queue(call)


def edge_of(x: Tensor) -> GradientEdge:
    """What get_gradient_edge gives for a tensor that is no leaf, without its checks, and with its
    token only where what is behind would be gone without one."""
    token = None
    if isinstance(x.grad_fn, torch._C._FunctionBase) and not _keeps_functions():
        with torch.enable_grad():
            token = x.view_as(x).grad_fn
    return GradientEdge(x.grad_fn, x.output_nr, token)  # type: ignore[arg-type]


@cache
def _keeps_functions() -> bool:
    """Whether the node of a Function lives as long as it is referred to from Python: that of torch
    2.11 goes with the last tensor."""
    with torch.enable_grad():
        node = _Same.apply(torch.zeros(1, requires_grad=True)).grad_fn  # type: ignore[no-untyped-call]
    try:
        return bool(node._input_metadata)
    except RuntimeError:
        return False


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


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
