"""act(gate) * x, of gated linear units, becomes meshfold::gated_product
(meshfold.ops.fused.gated_product), where nothing else reads act(gate)."""

from dataclasses import replace

from meshfold.capture.rewrites.patterns import Patterns
from meshfold.capture.trace.raw_program import RawArg, RawOp, RawProgram
from meshfold.ops.fused.gated_product import GATED_PRODUCT

_MUL, _SILU, _GELU = "aten.mul.Tensor", "aten.silu.default", "aten.gelu.default"


def with_gated_products(program: RawProgram) -> RawProgram:
    """`program` with one op for every activation that is multiplied with another tensor."""
    if not any(op.target in (_SILU, _GELU) for op in program.ops):
        return program
    patterns = Patterns(program)
    ops = [_gated(patterns, op) or op if op.target == _MUL else op for op in program.ops]
    return replace(program, ops=ops)


def _gated(patterns: Patterns, product: RawOp) -> RawOp | None:
    if product.kwargs or len(product.args) != 2:
        return None
    for activated, x in (product.args, product.args[::-1]):
        act = patterns.inner(activated, _SILU, _GELU)
        if act is None or activated == x or not _is_alike(patterns, activated, x):
            continue
        args = (act.args[0], x, _name(act))
        return replace(product, target=GATED_PRODUCT, args=args)
    return None


def _is_alike(patterns: Patterns, one: RawArg, other: RawArg) -> bool:
    a, b = patterns.value(one), patterns.value(other)
    return a is not None and b is not None and (a.shape, a.dtype) == (b.shape, b.dtype)


def _name(act: RawOp) -> str:
    if act.target == _SILU:
        return "silu"
    return "gelu_tanh" if ("approximate", "tanh") in act.kwargs or "tanh" in act.args else "gelu"
