"""Rules of experts: every row is multiplied with the weights of one of them.

    expert_linear    x[t, k], weight[e, o, k], ids[t] -> [t, o]
    dispatch         rows exchanged to the ranks that hold their experts; the identity unsharded
    combine          and back

Sharded by e, each rank has the weights of some experts. It takes all rows, makes those of its own
experts, leaves the others zero, and the ranks' results are summed: exact for any routing, and of
fixed shapes. Dispatched rows have rules of their own (passes/rules/expert_axis.py).
"""

from meshfold.ir.strategy import OpTyping
from meshfold.passes.rules.ops.labels import (
    BoundOp,
    Dims,
    OpLabels,
    Special,
    dim_label,
    numbered,
    rule,
)

EXPERT_LINEAR = "meshfold.expert_linear.default"
DISPATCH = "meshfold.dispatch.default"
COMBINE = "meshfold.combine.default"
DISPATCH_OPS = frozenset({DISPATCH, COMBINE})

DISPATCHED = "t"
"""Name of the rules of rows that are with their experts."""

EXPERT_LOAD = 1.25
"""Rows of the rank whose experts are wanted most, over the mean of all ranks: the room that Fedus,
Zoph, Shazeer (Switch Transformers, JMLR 23, 2022) give an expert beyond its mean share. Training
pushes routers towards 1; a rank with several experts is nearer to it than one expert is."""


def has_dispatched_rows(typing: OpTyping) -> bool:
    """Whether an op reads or makes rows that are with their experts, on some axis."""
    return any(t.kind == "E" for layout in (*typing.inputs, *typing.outputs) for t in layout)


def _expert_linear(op: BoundOp) -> OpLabels:
    """x [t, k], weight [e, o, k] or [e, k, o], ids [t], bias [e, o] -> [t, o]"""
    rows, k, o, e = dim_label("d0"), dim_label("k"), dim_label("o"), dim_label("e")
    weight: Dims = (e, k, o) if op.get("transposed") is True else (e, o, k)
    inputs: list[Dims] = [(rows, k), weight, (rows,)]
    inputs += [(e, o)] * len(op.positions("bias"))
    own = Special(local="expert_linear", load=EXPERT_LOAD)
    return OpLabels(
        tuple(inputs),
        ((rows, o),),
        summed=frozenset({"k", "e"}),
        added=frozenset(op.positions("bias")),
        special={"e": own, DISPATCHED: own},
    )


def _exchanged(op: BoundOp, local: str) -> OpLabels:
    """x [t, ...], ids [t] -> [t, ...], the identity where unsharded"""
    labels = numbered(op.value("x").shape)
    return OpLabels((labels, labels[:1]), (labels,), linear=(frozenset({0}),), local=local)


def _dispatch(op: BoundOp) -> OpLabels:
    return _exchanged(op, "dispatch")


def _combine(op: BoundOp) -> OpLabels:
    return _exchanged(op, "combine")


EXPERT_RULES = {
    EXPERT_LINEAR: rule("x weight ids bias transposed", _expert_linear),
    DISPATCH: rule("x ids num_experts", _dispatch),
    COMBINE: rule("x ids num_experts", _combine),
}
