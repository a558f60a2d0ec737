"""Which call of a fresh copy of a model is traced."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import nn

from meshfold.capture.python_state.held_state import Kept
from meshfold.ir.op_graph import Source


@dataclass(frozen=True)
class TracedCall:
    """prepare: what is done to the copy before its first call. num_calls: of forward, the last of
    which is traced. skips: whether it skips the layers that a draw may skip. found: tensors that an
    earlier call has left, which are inputs of the program; sources: what stands for each of them,
    where it may be read. marks_kept: whether the tensors that this call leaves are marked."""

    prepare: Callable[[nn.Module], None] = lambda _: None
    num_calls: int = 1
    skips: bool = False
    found: Kept = field(default_factory=dict)
    sources: Sequence[Source | None] = ()
    marks_kept: bool = False


FIRST_CALL = TracedCall()
