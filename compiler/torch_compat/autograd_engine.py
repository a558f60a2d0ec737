"""A backward that begins at edges, the end of one that is running, and when
torch.autograd.graph.saved_tensors_hooks are entered. The one file that knows autograd's engine and
how it keeps such hooks."""

from collections.abc import Callable, Iterator, Sequence
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


def gradients_from(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[GradientEdge]
) -> Sequence[Tensor | None]:
    """The gradients at `inputs` of what has `gradients` at `edges`; None for what is not used."""
    if _may_begin_at_functions():
        return torch.autograd.grad(edges, inputs, gradients, allow_unused=True)
    run = _engine_run()
    found: Sequence[Tensor | None] = run(
        tuple(edges), tuple(gradients), False, False, tuple(inputs), True, accumulate_grad=False
    )
    return found


def backward_from(edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Adds to the leaves behind `edges` what has `gradients` there."""
    if _may_begin_at_functions():
        torch.autograd.backward(edges, gradients)
        return
    _engine_run()(
        tuple(edges),
        tuple(gradients),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


@cache
def _may_begin_at_functions() -> bool:
    """Whether torch.autograd takes the edge of a custom Function as where to begin: torch 2.11 asks
    it for shapes that only nodes in C++ have, also where gradients are given."""
    x = torch.zeros(1, requires_grad=True)
    return hasattr(_Same.apply(x).grad_fn, "_input_metadata")  # type: ignore[no-untyped-call]


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _engine_run() -> Callable[..., Any]:
    """What both functions of torch.autograd call once shapes are checked."""
    run: Callable[..., Any] | None = getattr(graph, "_engine_run_backward", None)
    if run is None:  # pragma: no cover
        raise moved("_engine_run_backward")
    return run


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
