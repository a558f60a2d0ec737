"""Parts of complex tensors are written as real ones: torch has no gradient of the complex ops.

    out[:, :modes] = y      slice_scatter(out, y) of complex tensors, as in Fourier operators:

    view_as_complex(slice_scatter(view_as_real(out), view_as_real(y)))

An index (out[0] = y, select_scatter) is written in the same way.
"""

from collections.abc import Iterator
from dataclasses import replace

from meshfold.capture.trace.raw_program import Key, Operand, RawOp, RawProgram
from meshfold.ir.op_graph import Value

_WRITES = ("aten.slice_scatter.default", "aten.select_scatter.default")
_REAL = {"complex64": "float32", "complex128": "float64"}
"""The dtype of the parts of a number."""


def real_writes(program: RawProgram) -> RawProgram:
    """`program` without writes into complex tensors."""
    values = dict(program.values)
    ops: list[RawOp] = []
    for op in program.ops:
        if op.target in _WRITES and values[op.outputs[0]].dtype in _REAL:
            ops += _as_real(op, values)
        else:
            ops.append(op)
    return replace(program, ops=ops, values=values)


def _as_real(write: RawOp, values: dict[Key, Value]) -> Iterator[RawOp]:
    """The ops in place of `write`; `values` takes what they make."""
    (result,) = write.outputs
    into, part, *rest = write.args
    real = []
    for name, operand in (("into", into), ("part", part)):
        key = f"{result}:{name}"
        values[key] = _real(values[operand.key])
        real.append(Operand(key))
        target = "aten.view_as_real.default"
        yield replace(write, target=target, args=(operand,), kwargs=(), outputs=(key,))
    written = f"{result}:written"
    values[written] = _real(values[result])
    dim, *where = rest or (0,)
    # The real tensor has a dim more at its end.
    dim = dim % len(values[result].shape)
    yield replace(write, args=(*real, dim, *where), outputs=(written,))
    target = "aten.view_as_complex.default"
    yield replace(write, target=target, args=(Operand(written),), kwargs=(), outputs=(result,))


def _real(value: Value) -> Value:
    return replace(value, shape=(*value.shape, 2), dtype=_REAL[value.dtype])
