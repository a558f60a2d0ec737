"""What a captured program computes from its constants alone: numbers, or facts about them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshfold.capture.trace.raw_program import Key, Operand, RawArg, RawOp, RawProgram
from meshfold.errors import UnsupportedOpError
from meshfold.ir.op_graph import Source, SourceKind, Symbol
from meshfold.ops.registry import torch_target
from meshfold.torch_compat.dtypes import torch_constant

T = TypeVar("T")


def known_values(
    program: RawProgram,
    wanted: Sequence[Key],
    make: Callable[[RawOp, RawProgram, Mapping[Key, T | Tensor]], T | Tensor | None],
) -> dict[Key, T | Tensor]:
    """What is known of `wanted`, as far as anything is. make: what an op with one result makes of
    operands that are all known; None where that is not known."""
    known: dict[Key, T | Tensor] = {
        Source(SourceKind.CONSTANT, name): tensor for name, tensor in program.constants.items()
    }
    makers = _makers(program, wanted)
    last = {key: k for k, op in enumerate(makers) for key in op.operands}
    for k, op in enumerate(makers):
        if len(op.outputs) == 1 and all(key in known for key in op.operands):
            found = make(op, program, known)
            if found is not None:
                known[op.outputs[0]] = found
        for key in set(op.operands).difference(wanted):
            if last[key] == k:  # the last reader: lines of a large batch need not pile up
                known.pop(key, None)
    return known


def _makers(program: RawProgram, wanted: Sequence[Key]) -> list[RawOp]:
    """The ops that compute `wanted`, in order."""
    needed = set(wanted)
    makers = []
    for op in reversed(program.ops):
        if not needed.isdisjoint(op.outputs):
            makers.append(op)
            needed.update(op.operands)
    return makers[::-1]


def computed(op: RawOp, known: Mapping[Key, Any]) -> Tensor | None:
    """The numbers that an op makes of known tensors, unless it draws them or is the user's."""
    if op.custom is not None:
        return None
    try:
        function: Any = torch_target(op.target)
    except UnsupportedOpError:
        return None
    if torch.Tag.nondeterministic_seeded in function.tags:
        return None

    def real(arg: RawArg) -> Any:
        if isinstance(arg, Operand):
            return known[arg.key]
        if isinstance(arg, Symbol):
            return torch_constant(arg, torch.device("cpu"))
        return [real(a) for a in arg] if isinstance(arg, tuple) else arg

    with torch.no_grad():
        made = function(*map(real, op.args), **{name: real(a) for name, a in op.kwargs})
    return made if isinstance(made, Tensor) else None
