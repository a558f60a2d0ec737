"""The end of a backward that is running. The one file that knows autograd's engine."""

from collections.abc import Callable

import torch

from meshfold.errors import MeshfoldError


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have `call` run when the backward that runs now is over. To be called inside of one."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    queue = getattr(engine, "queue_callback", None)
    if queue is None:  # pragma: no cover
        raise MeshfoldError(
            f"torch {torch.__version__} moved queue_callback; use torch 2.11 to 2.13"
        )
    queue(call)
