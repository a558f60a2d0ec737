"""What a program computes from constants and from buffers that it does not write: the same in every
step, until somebody loads other buffers. Forward may compute such a value in its first call and
read it in those that follow (masks, tables of positions, windows)."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from meshfold.capture.trace.lower import ALIAS, CAST
from meshfold.capture.trace.raw_program import (
    SHAPE_ONLY,
    Key,
    Operand,
    RawOp,
    RawProgram,
)
from meshfold.ir.op_graph import Source, SourceKind
from meshfold.ops.registry import draws

_SAME = frozenset(
    (ALIAS, "aten.detach.default", "aten.clone.default", "aten.lift_fresh_copy.default")
)
"""Ops whose result has the values of their operand."""


def lasting_values(program: RawProgram) -> dict[Key, Source]:
    """What stands for each value that is the same in every step: the constant or buffer that it is,
    or a constant named by how it is computed, so that values computed alike have one name."""
    written = {buffer for buffer, _ in program.mutations}
    found: dict[Key, Source] = {
        key: key
        for key in program.values
        if isinstance(key, Source)
        and (
            key.kind is SourceKind.CONSTANT
            or key.kind is SourceKind.BUFFER
            and key.name not in written
        )
    }
    for op in program.ops:
        found.update(_made(op, program, found))
    return found


def _made(op: RawOp, program: RawProgram, known: Mapping[Key, Source]) -> dict[str, Source]:
    """What stands for the results of an op; nothing where they may differ from step to step."""
    args = op.args[1:] if op.target in SHAPE_ONLY else op.args
    operands = list(replace(op, args=args).operands)
    if op.custom is not None or any(key not in known for key in operands):
        return {}
    if draws(op.target, op.args, op.kwargs):
        return {}
    if op.target in _SAME or _casts_to_nothing_else(op, program):
        return {op.outputs[0]: known[operands[0]]}
    formula = op.target, _mapped((args, op.kwargs), known.__getitem__)
    found = {}
    for k, key in enumerate(op.outputs):
        value = program.values[key]
        text = repr((formula, k, value.shape, value.dtype))
        name = f"lasting_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        found[key] = Source(SourceKind.CONSTANT, name)
    return found


def _casts_to_nothing_else(op: RawOp, program: RawProgram) -> bool:
    """Whether a cast leaves the dtype as it is: what a device or a layout is, no value says."""
    if op.target != CAST or not isinstance(op.args[0], Operand):
        return False
    return program.values[op.args[0].key].dtype == program.values[op.outputs[0]].dtype


def _mapped(arg: Any, of: Callable[[Key], Any]) -> Any:
    """Arguments with `of(key)` in place of their operands."""
    if isinstance(arg, Operand):
        return of(arg.key)
    return tuple(_mapped(a, of) for a in arg) if isinstance(arg, tuple) else arg


def with_lasting_values(program: RawProgram) -> RawProgram:
    """The same program that takes such values instead of computing them, to be compared with
    another: it cannot run."""
    known = lasting_values(program)
    values = dict(program.values)
    for key, source in known.items():
        values.setdefault(source, program.values[key])

    def taken(key: Key) -> Operand:
        return Operand(known.get(key, key))

    ops = [
        replace(op, args=_mapped(op.args, taken), kwargs=_mapped(op.kwargs, taken))
        for op in program.ops
        if known.keys().isdisjoint(op.outputs)
    ]
    return replace(
        program,
        ops=ops,
        values=values,
        outputs=[(name, known.get(key, key)) for name, key in program.outputs],
        mutations=[(name, known.get(key, key)) for name, key in program.mutations],
    )
