"""Refuses models that go through a sequence step by step: their graph would grow with its length.

A recurrence that Python unrolls (Mamba without its kernels, RWKV on a CPU) leaves the same few ops
for every position:

    x[:, 0]   state = f(state, x[:, 0])   x[:, 1]   state = f(state, x[:, 1])   ...

thousands of them, each too small for a device. What gives it away: one line of code selects
MOST_STEPS places of a dim or more, and each is joined with what the place before it has led to.
"""

from meshfold.capture.trace.raw_program import Key, Operand, Program, RawOp
from meshfold.errors import CaptureError

MOST_STEPS = 8
"""Far below a sequence worth training on. The steps of a recurrence share a state and its
coefficients: typing as few as these takes the search minutes already."""

_Line = tuple[tuple[str, ...], str, Key, int]
"""The call of a module, a line of code, the value that is selected from, and the dim."""


def refuse_steps(program: Program) -> None:
    """Raises CaptureError, naming line and op, for a state that is carried from place to place."""
    lines: dict[_Line, list[RawOp]] = {}
    for op in program.ops:
        found = _place(op)
        if found is not None:
            lines.setdefault(found, []).append(op)
    for (stack, source, _, _), places in lines.items():
        num_places = len({op.args[1:3] for op in places})
        if num_places >= MOST_STEPS and _is_carried(program, places):
            scope = stack[-1] if stack else "the model"
            raise CaptureError(
                f"{scope} carries a state through {num_places} places of a sequence one by one, "
                f"which would be some {_num_ops(program, places)} ops; use a form that sees the "
                "sequence at once (attention, a convolution, an associative or chunked scan)",
                op=places[0].target,
                source=source,
            )


def _place(op: RawOp) -> _Line | None:
    """Where an op selects one place of a dim."""
    value, *rest = op.args or (None,)
    if not isinstance(value, Operand):
        return None
    is_place = op.target == "aten.select.int"
    if op.target == "aten.slice.Tensor" and len(rest) > 2:
        _, start, end = rest[:3]
        is_place = isinstance(start, int) and end == start + 1
    if not is_place or not isinstance(rest[0], int):
        return None
    return op.stack, op.source, value.key, rest[0]


def _is_carried(program: Program, places: list[RawOp]) -> bool:
    """Whether most places meet the place before them, each in an op of its own. Terms that are
    added up one by one are no state."""
    number = {op.outputs[0]: k for k, op in enumerate(places)}
    reached: dict[Key, int] = {}  # per value the places that it depends on, as bits
    last: Key | None = None
    met = meetings = 0
    for op in program.ops:
        operands = list(op.operands)
        bits = 0
        for key in operands:
            bits |= reached.get(key, 0)
        new = bits & (bits >> 1) & ~met
        if new:
            met |= new
            is_sum = op.target == "aten.add.Tensor" and (last is None or last in operands)
            last = op.outputs[0]
            meetings += not is_sum
        for key in op.outputs:
            reached[key] = bits | (1 << number[key] if key in number else 0)
    return meetings >= len(places) // 2


def _num_ops(program: Program, places: list[RawOp]) -> int:
    """Ops of the call that the places belong to."""
    return sum(op.stack == places[0].stack for op in program.ops)
