"""Rules of losses."""

import math
from types import MappingProxyType

from meshfold.opgraph import ITEM_BYTES
from meshfold.passes.rule_labels import (
    BoundOp,
    Dims,
    OpLabels,
    RuleComm,
    Special,
    numbered,
    part,
    rule,
)
from meshfold.spmd import INVARIANT

MEAN, SUM = 1, 2
"""The `reduction` argument of aten losses; 0 is none."""


def _cross_entropy(op: BoundOp) -> OpLabels | None:
    """logits [rows, v] or [rows, v, ...], target [rows, ...].

    v: every rank holds some classes of every row; the maximum is all-reduced, then the sum of
    exponentials and the target's logit together, and the loss leaves Invariant. Rows are summed;
    the mean divides by the number of targets that count, all-reduced, so it is exact when ranks
    ignore unequal numbers.
    """
    if op.has_tensor("weight") or op.get("label_smoothing", 0.0) != 0:
        return None
    logits, target = op.value("self"), op.value("target")
    if len(logits.shape) < 2 or target.is_float:
        return None
    first, *rest = numbered(target.shape)
    rows: Dims = (first, *rest)
    classes: Dims = (first, part("v"), *rest)
    row_labels = [p[0] for p in rows if p is not None]
    num_rows = math.prod(target.shape)
    scalar = ITEM_BYTES[logits.dtype]
    vocabulary = tuple(RuleComm("all_reduce", n * num_rows * scalar) for n in (1, 2))
    reduction = op.integer("reduction", MEAN)
    count = (RuleComm("all_reduce", scalar),) if reduction == MEAN else ()
    special = {label: Special(local="cross_entropy", comm=count) for label in row_labels}
    special["v"] = Special(output=INVARIANT, local="cross_entropy", comm=vocabulary)
    if reduction not in (MEAN, SUM):
        return OpLabels((classes, rows), (rows,), special=MappingProxyType({"v": special["v"]}))
    return OpLabels(
        (classes, rows),
        ((),),
        summed=frozenset(row_labels),
        special=MappingProxyType(special),
    )


LOSS_RULES = {
    "aten.cross_entropy_loss.default": rule(
        "self target weight reduction ignore_index label_smoothing", _cross_entropy
    ),
}
