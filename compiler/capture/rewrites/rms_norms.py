"""Norms that models write out become meshfold::rms_norm (meshfold.ops.fused.rms_norm).

    inverse = rsqrt(mean(pow(x, 2), -1, keepdim) + eps)
    x * inverse                          then, or not, times a weight [n]

with casts to float32 and back in between, as LlamaRMSNorm, T5LayerNorm, Gemma's (times 1 + weight)
and their kin have them. What nothing else reads is replaced, up to a result in the dtype of x:
rounding alone tells it from the original, once instead of twice.

Rows that come straight from a product stay as they are: ranks may have shards of their columns, and
what is written out in single ops is shared by columns then.
"""

from dataclasses import replace

from meshfold.capture.rewrites.patterns import Patterns
from meshfold.capture.trace.raw_program import Operand, RawArg, RawOp, RawProgram
from meshfold.ops.fused.rms_norm import RMS_NORM

_MUL = "aten.mul.Tensor"
_PRODUCTS = tuple(f"aten.{name}.default" for name in ("linear", "addmm", "mm", "bmm", "matmul"))
_VIEWS = ("aten.reshape.default", "aten.view.default", "aten._unsafe_view.default")


def with_norms(program: RawProgram) -> RawProgram:
    """`program` with one op for every norm by the root mean square."""
    patterns = Patterns(program)
    found: dict[str, RawOp] = {}
    for op in program.ops:
        if op.target == "aten.rsqrt.default" and (norm := _norm(patterns, op)) is not None:
            found[norm.outputs[0]] = norm
    ops = [found.get(op.outputs[0], op) if op.outputs else op for op in program.ops]
    return replace(program, ops=ops) if found else program


def _norm(patterns: Patterns, rsqrt: RawOp) -> RawOp | None:
    """The norm that multiplies with the result of `rsqrt`, if it is one."""
    measured = _measured(patterns, rsqrt)
    product = patterns.reader(rsqrt.outputs[0])
    if measured is None or product is None or product.target != _MUL:
        return None
    x, eps = measured
    inverse = Operand(rsqrt.outputs[0])
    rows = next((a for a in product.args if a != inverse), None)
    if rows is None or x not in (rows, patterns.before_cast(rows)):
        return None
    if _comes_from_product(patterns, x):
        return None
    return _as_far_as_it_goes(patterns, product, x, eps)


def _measured(patterns: Patterns, rsqrt: RawOp) -> tuple[Operand, float] | None:
    """(x, eps) of the inverse root mean square of its rows."""
    total = patterns.inner(rsqrt.args[0], "aten.add.Tensor")
    if total is None or total.kwargs or not isinstance(total.args[1], float):
        return None
    mean = patterns.inner(total.args[0], "aten.mean.dim")
    if mean is None or mean.kwargs or len(mean.args) != 3 or mean.args[2] is not True:
        return None
    value = patterns.value(mean.args[0])
    squared = _squared(patterns, mean.args[0])
    if value is None or squared is None:
        return None
    if mean.args[1] not in ((-1,), (len(value.shape) - 1,)):
        return None
    x = patterns.before_cast(squared)
    return (x, total.args[1]) if isinstance(x, Operand) else None


def _squared(patterns: Patterns, arg: RawArg) -> RawArg:
    """What `arg` is the square of; None if of nothing."""
    op = patterns.inner(arg, "aten.pow.Tensor_Scalar", "aten.square.default", _MUL)
    if op is None or op.kwargs:
        return None
    if op.target == "aten.square.default":
        return op.args[0]
    is_square = op.args[1] == (op.args[0] if op.target == _MUL else 2)
    return op.args[0] if is_square else None


def _comes_from_product(patterns: Patterns, x: Operand) -> bool:
    """Whether the columns of x are those of a matrix product."""
    width = patterns.values[x.key].shape[-1]
    while (view := patterns.maker(x, *_VIEWS)) is not None:
        x = view.args[0]
        if patterns.values[x.key].shape[-1:] != (width,):
            return False
    return patterns.maker(x, *_PRODUCTS) is not None


def _as_far_as_it_goes(patterns: Patterns, product: RawOp, x: Operand, eps: float) -> RawOp | None:
    """The norm, from its first product on through casts and a weight, to the last result that has
    the dtype of x."""
    width = patterns.values[x.key].shape[-1]
    last, weight, found = product, None, None
    while True:
        out = last.outputs[0]
        if patterns.values[out].dtype == patterns.values[x.key].dtype:
            args = (x, (width,), weight, eps)
            found = replace(last, target=RMS_NORM, args=args, kwargs=())
        reader = patterns.reader(out)
        if reader is None or reader.custom is not None:
            return found
        if weight is None and reader.target == _MUL and not reader.kwargs:
            weight = next((a for a in reader.args if a != Operand(out)), None)
            value = patterns.value(weight)
            if value is None or value.shape != (width,) or not value.is_float:
                return found
        elif not patterns.is_float_cast(reader):
            return found
        last = reader
