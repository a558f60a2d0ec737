"""Captured programs that cannot run are refused: recurrences, and random draws without a rule.

A recurrence that Python unrolls (Mamba without its kernels, RWKV on a CPU) leaves the same few ops
for every position, thousands of them, each too small for a device:

    x[:, 0]   state = f(state, x[:, 0])   x[:, 1]   state = f(state, x[:, 1])   ...

It shows in this: one line of code selects more than MOST_STEPS positions of a dim, and each is
joined with what the position before it has led to.
"""

from meshfold.capture.trace.raw_program import Key, Operand, RawOp, RawProgram
from meshfold.errors import CaptureError, UnsupportedOpError
from meshfold.ops.registry import draws
from meshfold.passes.rules.ops.random import RANDOM_OPS

MOST_STEPS = 64
"""A recurrence over frames, glimpses or a short text. With so many steps of a GRU written by hand
(1,000 ops) capture takes 8 s and a plan as long; both grow with the number of steps."""

_Line = tuple[tuple[str, ...], str, Key, int]
"""The call of a module, a line of code, the value that is selected from, and the dim."""


def refuse_steps(program: RawProgram) -> None:
    """Raises CaptureError, naming line and op, for a state carried from position to position."""
    lines: dict[_Line, list[RawOp]] = {}
    for op in program.ops:
        found = _position(op)
        if found is not None:
            lines.setdefault(found, []).append(op)
    for (stack, source, _, _), positions in lines.items():
        num_positions = len({op.args[1:3] for op in positions})
        if num_positions > MOST_STEPS and _is_carried(program, positions):
            scope = stack[-1] if stack else "the model"
            raise CaptureError(
                f"{scope} carries a state through {num_positions} positions of a sequence one by "
                f"one, which would be some {_num_ops(program, positions)} ops; use a form that "
                "sees the sequence at once (attention, a convolution, an associative or chunked "
                "scan)",
                op=positions[0].target,
                source=source,
            )


def _position(op: RawOp) -> _Line | None:
    """The line at which an op selects one position of a dim."""
    value, *rest = op.args or (None,)
    if not isinstance(value, Operand):
        return None
    is_position = op.target == "aten.select.int"
    if op.target == "aten.slice.Tensor" and len(rest) > 2:
        _, start, end = rest[:3]
        is_position = isinstance(start, int) and end == start + 1
    if not is_position or not isinstance(rest[0], int):
        return None
    return op.stack, op.source, value.key, rest[0]


def _is_carried(program: RawProgram, positions: list[RawOp]) -> bool:
    """Whether most positions meet the one before them, each in an op of its own. Terms that are
    added up one by one are no state."""
    number = {op.outputs[0]: k for k, op in enumerate(positions)}
    reached: dict[Key, int] = {}  # per value the positions that it depends on, as bits
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
    return meetings >= len(positions) // 2


def _num_ops(program: RawProgram, positions: list[RawOp]) -> int:
    """Ops of the call that the positions belong to."""
    return sum(op.stack == positions[0].stack for op in program.ops)


def refuse_draws(program: RawProgram) -> None:
    """Raises UnsupportedOpError, naming op, module and line, for random numbers that no rule draws
    alike on all ranks."""
    for op in program.ops:
        if op.target not in RANDOM_OPS and draws(op.target, op.args, op.kwargs):
            raise UnsupportedOpError(
                f"{op.target} in {op.stack[-1] if op.stack else 'the model'} draws random numbers, "
                "which ranks would not agree on; switch it off in the model's configuration, or "
                "draw outside the model and pass the numbers in",
                op=op.target,
                source=op.source,
            )
