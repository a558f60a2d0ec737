"""GELU written as a formula becomes aten.gelu, which keeps its input alone.

GPT-2's (transformers' NewGELUActivation) is eight ops, of which autograd keeps five tensors:

    0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))

Whatever the spelling: a product of which tanh or erf is a part, made by elementwise arithmetic from
one tensor of its shape and dtype, is computed on numbers in float64 and held against both forms of
GELU. Formulas of so few constants that agree to 1e-12 on all of them are one function;
another one is left as it is.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.nn import functional

from meshfold.capture.rewrites.known_values import computed
from meshfold.capture.rewrites.patterns import Patterns
from meshfold.capture.trace.raw_program import Key, Operand, RawOp, RawProgram

_MUL = "aten.mul.Tensor"
_CURVES = ("aten.tanh.default", "aten.erf.default")
_ARITHMETIC = frozenset(
    (
        _MUL,
        *_CURVES,
        "aten.add.Tensor",
        "aten.sub.Tensor",
        "aten.div.Tensor",
        "aten.pow.Tensor_Scalar",
        "aten.square.default",
        "aten.neg.default",
    )
)
_MOST_OPS = 12
_TOLERANCE = 1e-12


def with_gelus(program: RawProgram) -> RawProgram:
    """`program` with aten.gelu for every formula of it."""
    if not any(op.target in _CURVES for op in program.ops):
        return program
    patterns = Patterns(program)
    ops = [_gelu(patterns, op) or op if op.target == _MUL else op for op in program.ops]
    return replace(program, ops=ops)


def _gelu(patterns: Patterns, product: RawOp) -> RawOp | None:
    """aten.gelu for the product that ends its formula."""
    inside = _inside(patterns, product)
    if not any(op.target in _CURVES for op in inside):
        return None
    for key in dict.fromkeys(key for op in inside for key in op.operands):
        formula = _formula_of(inside, key) if _is_alike(patterns, key, product) else []
        if formula and (how := _approximation(formula, key)):
            kwargs = (("approximate", how),)
            return replace(product, target="aten.gelu.default", args=(Operand(key),), kwargs=kwargs)
    return None


def _inside(patterns: Patterns, product: RawOp) -> list[RawOp]:
    """The arithmetic behind a product, itself first; as far as few ops go."""
    found = {product.outputs[0]: product}
    waiting = [product]
    while waiting and len(found) <= _MOST_OPS:
        for key in waiting.pop(0).operands:
            op = patterns.maker(Operand(key), *_ARITHMETIC)
            if op is not None and key not in found and _is_alike(patterns, key, product):
                found[op.outputs[0]] = op
                waiting.append(op)
    return list(found.values())


def _is_alike(patterns: Patterns, key: Key, product: RawOp) -> bool:
    one, other = patterns.value(Operand(key)), patterns.values[product.outputs[0]]
    return one is not None and (one.shape, one.dtype) == (other.shape, other.dtype)


def _formula_of(inside: list[RawOp], key: Key) -> list[RawOp]:
    """The ops, in order, that make the first of `inside` of the value `key` and of nothing else;
    empty if there are none."""
    makers: dict[Key, RawOp] = {op.outputs[0]: op for op in inside}
    ordered: dict[Key, RawOp] = {}

    def visit(wanted: Key) -> Iterator[bool]:
        if wanted == key or wanted in ordered:
            return
        op = makers.get(wanted)
        if op is None:
            yield False
            return
        for operand in op.operands:
            yield from visit(operand)
        ordered[wanted] = op

    return list(ordered.values()) if all(visit(inside[0].outputs[0])) else []


def _approximation(formula: list[RawOp], key: Key) -> str:
    """The form of GELU that a formula is; "" if none."""
    points = torch.linspace(-9.0, 9.0, 257, dtype=torch.float64)
    known = {key: points}
    for op in formula:
        made = computed(op, known)
        if made is None:
            return ""
        known[op.outputs[0]] = made
    found = known[formula[-1].outputs[0]]
    for how in ("tanh", "none"):
        right = functional.gelu(points, approximate=how)
        if bool(((found - right).abs() <= _TOLERANCE * (1 + points.abs())).all()):
            return how
    return ""
