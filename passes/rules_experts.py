"""Rules of experts: every row is multiplied with the weights of one of them.

Sharded by e, each rank has the weights of some experts. It takes all rows, makes those of its own
experts, leaves the others zero, and the ranks' results are summed: exact for any routing, and of
fixed shapes.
"""

from types import MappingProxyType

from meshfold.passes.rule_labels import BoundOp, Dims, OpLabels, Special, part, rule

EXPERT_LINEAR = "meshfold.expert_linear.default"

EXPERT_LOAD = 1.25
"""Rows of the rank whose experts are wanted most, over the mean of all ranks: the room that Fedus,
Zoph, Shazeer (Switch Transformers, JMLR 23, 2022) give an expert beyond its mean share. Training
pushes routers towards 1; a rank with several experts is nearer to it than one expert is."""


def _expert_linear(op: BoundOp) -> OpLabels:
    """x [t, k], weight [e, o, k] or [e, k, o], ids [t], bias [e, o] -> [t, o]"""
    rows, k, o, e = part("d0"), part("k"), part("o"), part("e")
    weight: Dims = (e, k, o) if op.get("transposed") is True else (e, o, k)
    inputs: list[Dims] = [(rows, k), weight, (rows,)]
    inputs += [(e, o)] * len(op.positions("bias"))
    return OpLabels(
        tuple(inputs),
        ((rows, o),),
        summed=frozenset({"k", "e"}),
        added=frozenset(op.positions("bias")),
        special=MappingProxyType({"e": Special(local="expert_linear", load=EXPERT_LOAD)}),
    )


EXPERT_RULES = {EXPERT_LINEAR: rule("x weight ids bias transposed", _expert_linear)}
