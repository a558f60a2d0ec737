"""Whether the next call of forward computes what the traced one does.

What the first call leaves in modules, in objects of the user and in globals is set in a fresh copy
of the model, and a call of that is traced, which must give the same graph:

    plain values      as they are
    tensors           without values: whoever reads one has another graph
    cached tensors    if that fails, what is computed from constants and buffers alone and so is the
                      same in every step (masks, tables of positions) stands for how it is computed
    anything else     a second call of one copy is traced
"""

import copy
from collections.abc import Callable, Sequence
from typing import Protocol

from meshfold.capture.python_state.held_state import (
    Changes,
    Kept,
    NewModulesError,
    refused_change,
    set_values,
)
from meshfold.capture.rewrites.lasting_values import lasting_values
from meshfold.capture.trace.raw_program import RawProgram
from meshfold.capture.trace.traced_call import TracedCall
from meshfold.errors import CaptureError
from meshfold.ir.op_graph import Source


class Traced(Protocol):
    """What a trace says of the state that forward changes."""

    @property
    def changed(self) -> Changes: ...
    @property
    def kept(self) -> Kept: ...
    @property
    def held(self) -> str: ...
    @property
    def program(self) -> RawProgram: ...


def refuse_other_next_call(
    trace: Traced,
    is_same: Callable[[TracedCall], bool],
    is_same_with_caches: Callable[[], bool],
) -> None:
    """Raises CaptureError where forward computes something else with what a call before has left.

    is_same: whether a call gives the graph of `trace`; is_same_with_caches: the same for the call
    after the first, with cached tensors.
    """

    def again(call: TracedCall) -> bool:
        try:
            return is_same(call)
        except CaptureError:  # what is there then cannot be captured
            return False

    changed, kept, held = trace.changed, trace.kept, trace.held
    if not (changed or kept or held):
        return
    second = TracedCall(num_calls=2)
    try:
        if again(_call_after(changed, kept)):
            changed, kept = {}, {}
        # As Hugging Face sets a flag beside the hooks that it installs.
        elif changed and again(second):
            return
        elif changed and kept and again(_call_after(changed, {})):
            changed = {}
    except NewModulesError:
        # As BigBird does, which puts another attention in place for short sequences.
        if again(second):
            return
    if held and not changed and not kept and again(second):
        return
    if kept and not held and _holds(is_same_with_caches):
        return
    if changed or kept or held:
        raise refused_change(changed, kept, held)


def _holds(check: Callable[[], bool]) -> bool:
    try:
        return check()
    except (CaptureError, NewModulesError):
        return False


def call_with_caches(first: Traced) -> TracedCall:
    """The call after `first`, a trace with marks_kept, for which cached tensors stand for how they
    are computed."""
    known = lasting_values(first.program)
    return _call_after(first.changed, first.kept, [known.get(k) for k in first.program.marked])


def _call_after(changed: Changes, kept: Kept, sources: Sequence[Source | None] = ()) -> TracedCall:
    """The call of a copy in which what a call has left is set. sources: what stands for each tensor
    of `kept`, if it may be read."""
    plain = {key: copy.copy(value) for key, (_, value) in changed.items()}
    return TracedCall(lambda fresh: set_values(fresh, plain), found=kept, sources=sources)
