"""Rules of losses: elementwise ones, those of rows (similarities, margins), those over classes.

A mean over what is sharded evenly is that of every rank over the number of ranks (local "mean");
one over targets divides by how many of them count on all ranks, whichever rank ignores more.
"""

import math
from itertools import zip_longest

from meshfold.ir.op_graph import ITEM_BYTES
from meshfold.ir.spmd import INVARIANT
from meshfold.passes.rules.ops.labels import (
    BoundOp,
    Dims,
    OpLabels,
    RuleComm,
    Special,
    broadcast_dims,
    dim_label,
    numbered,
    rule,
)

NONE, MEAN, SUM = 0, 1, 2
"""The `reduction` argument of aten losses."""

_V = frozenset({"v"})


def _reduced(op: BoundOp, inputs: tuple[Dims, ...], losses: Dims) -> OpLabels:
    """Losses of the dims `losses`, then added up or averaged as the op is told."""
    reduction = op.integer("reduction", MEAN)
    if reduction == NONE:
        return OpLabels(inputs, (losses,))
    summed = frozenset(p[0] for p in losses if p)
    local = Special(local="mean" if reduction == MEAN else "plain")
    special = dict.fromkeys(summed, local)
    return OpLabels(inputs, ((),), summed=summed, special=special)


def _elementwise(op: BoundOp) -> OpLabels:
    """Operands are broadcast to the losses."""
    sizes = zip_longest(*(v.shape[::-1] for v in op.values), fillvalue=1)
    shape = tuple(max(of_dim) for of_dim in sizes)[::-1]
    labels = numbered(shape)
    return _reduced(op, tuple(broadcast_dims(v.shape, shape, labels) for v in op.values), labels)


def _of_rows(op: BoundOp) -> OpLabels | None:
    """Losses of rows [..., n, d], d unsharded; a target is [..., n]."""
    rows = numbered(op.values[0].shape[:-1])
    rank = len(rows) + 1
    if rank < 2 or any(len(v.shape) not in (rank - 1, rank) for v in op.values):
        return None
    if len({v.shape[: rank - 1] for v in op.values}) > 1:
        return None
    inputs = tuple((*rows, None) if len(v.shape) == rank else rows for v in op.values)
    return _reduced(op, inputs, rows)


def _similarity(op: BoundOp) -> OpLabels:
    """x1, x2 broadcast to one shape, of which `dim` is unsharded and gone."""
    one, other = (v.shape for v in op.values)
    shape = tuple(max(s) for s in zip_longest(one[::-1], other[::-1], fillvalue=1))[::-1]
    dim = op.dim("dim", len(shape), 1)
    labels = numbered(shape, but=(dim,))
    inputs = tuple(broadcast_dims(s, shape, labels) for s in (one, other))
    return OpLabels(inputs, ((*labels[:dim], *labels[dim + 1 :]),))


def _distance(op: BoundOp) -> OpLabels | None:
    """x1, x2 [..., d] -> [...], d unsharded; or 1 as `keepdim` says."""
    one, other = (v.shape for v in op.values)
    if one != other:
        return None
    rows = numbered(one[:-1])
    out = (*rows, None) if op.get("keepdim") else rows
    return OpLabels(((*rows, None),) * 2, (out,))


def _cross_entropy(op: BoundOp) -> OpLabels | None:
    """logits [rows, v] or [rows, v, ...], target [rows, ...] or as the logits, weight [v].

    v: every rank holds some classes of every row; the maximum is all-reduced, then the sum of
    exponentials and the target's logit together, with smoothing a sum of logits, too, and the loss
    leaves Invariant. Rows are summed; the mean divides by the number, or the weights, of the
    targets that count, all-reduced, so it is exact when ranks ignore unequal numbers. Targets that
    are probabilities all count.
    """
    logits, target = op.value("self"), op.value("target")
    if len(logits.shape) < 2:
        return None
    first, *rest = numbered((logits.shape[0], *logits.shape[2:]))
    rows: Dims = (first, *rest)
    weights: list[Dims] = [(None,)] * len(op.positions("weight"))
    if target.is_float:
        of_logits = (first, None, *rest)
        return _reduced(op, (of_logits, of_logits, *weights), rows)
    row_labels = [p[0] for p in rows if p is not None]
    num_rows = math.prod(target.shape)
    scalar = max(ITEM_BYTES[logits.dtype], ITEM_BYTES["float32"])
    num_sums = 2 + (op.get("label_smoothing", 0.0) != 0)
    vocabulary = tuple(RuleComm("all_reduce", n * num_rows * scalar) for n in (1, num_sums))
    reduction = op.integer("reduction", MEAN)
    count = (RuleComm("all_reduce", scalar),) if reduction == MEAN else ()
    special = {"v": Special(output=INVARIANT, local="cross_entropy", comm=vocabulary)}
    inputs = ((first, dim_label("v"), *rest), rows, *weights)
    if reduction == NONE:
        return OpLabels(inputs, (rows,), special=special, pads=_V)
    special |= {label: Special(local="cross_entropy", comm=count) for label in row_labels}
    return OpLabels(
        inputs,
        ((),),
        summed=frozenset(row_labels),
        special=special,
        pads=_V,
    )


def _linear_cross_entropy(op: BoundOp) -> OpLabels:
    """input [rows, k], matrix [v, k], target [rows], bias [v], weight [v]: the same of logits that
    are made chunk by chunk, so k is unsharded. v: the ranks' own maxima and sums as above."""
    x, scalar_dtype = op.value("input"), max(ITEM_BYTES[op.value("input").dtype], 4)
    rows, v = dim_label("d0"), dim_label("v")
    num_sums = 2 + (op.get("label_smoothing", 0.0) != 0)
    num_rows = x.shape[0]
    vocabulary = tuple(RuleComm("all_reduce", n * num_rows * scalar_dtype) for n in (1, num_sums))
    reduction = op.integer("reduction", MEAN)
    count = (RuleComm("all_reduce", scalar_dtype),) if reduction == MEAN else ()
    local = "linear_cross_entropy"
    special = {"v": Special(output=INVARIANT, local=local, comm=vocabulary)}
    inputs: list[Dims] = [(rows, None), (v, None), (rows,)]
    inputs += [(v,)] * len(op.positions("bias")) + [(None,)] * len(op.positions("weight"))
    if reduction == NONE:
        return OpLabels(tuple(inputs), ((rows,),), special=special, pads=_V)
    special["d0"] = Special(local=local, comm=count)
    summed = frozenset({"d0"})
    return OpLabels(tuple(inputs), ((),), summed=summed, special=special, pads=_V)


def _negative_log_likelihood(op: BoundOp) -> OpLabels | None:
    """Logarithms [rows, classes, ...], classes unsharded; its mean is that of cross entropy."""
    x = op.value("self").shape
    if len(x) < 2:
        return None
    first, *rest = numbered((x[0], *x[2:]))
    rows: Dims = (first, *rest)
    inputs = ((first, None, *rest), rows, *[(None,)] * len(op.positions("weight")))
    reduction = op.integer("reduction", MEAN)
    if reduction == NONE:
        return OpLabels(inputs, (rows,))
    comm = (RuleComm("all_reduce", ITEM_BYTES[op.value("self").dtype]),)
    counted = Special(local="nll_loss", comm=comm) if reduction == MEAN else Special()
    summed = frozenset(p[0] for p in rows if p)
    special = dict.fromkeys(summed, counted)
    return OpLabels(inputs, ((),), summed=summed, special=special)


def _ctc(op: BoundOp) -> OpLabels:
    """log_probs [t, n, c], targets [n, s], lengths [n] -> [n]: sequences are apart."""
    n = dim_label("n")
    return OpLabels(((None, n, None), (n, None), (n,), (n,)), ((n,),))


CROSS_ENTROPY = "aten.cross_entropy_loss.default"
NARROW_CROSS_ENTROPY = "meshfold.cross_entropy.default"
"""The same of narrow logits, losses in float32 (meshfold.ops.vocab_parallel_cross_entropy)."""
LINEAR_CROSS_ENTROPY = "meshfold.linear_cross_entropy.default"
"""That of logits which it makes itself, in chunks."""
CLASSES_OF_LOSSES = {
    CROSS_ENTROPY: (0, 1, 2),
    NARROW_CROSS_ENTROPY: (0, 1, 2),
    LINEAR_CROSS_ENTROPY: (1, 0, 3),
}
"""Of losses whose classes may be sharded: operand and dim that have the rank's classes, and how
many operands there are without class weights (and bias), which come last."""
NLL_LOSS = "aten.nll_loss_nd.default"

LOSS_RULES = {
    "meshfold.ctc_loss.default": rule(
        "log_probs targets input_lengths target_lengths blank zero_infinity", _ctc
    ),
    CROSS_ENTROPY: rule(
        "self target weight reduction ignore_index label_smoothing", _cross_entropy
    ),
    NARROW_CROSS_ENTROPY: rule(
        "self target weight reduction ignore_index label_smoothing", _cross_entropy
    ),
    LINEAR_CROSS_ENTROPY: rule(
        "input matrix target bias weight reduction ignore_index label_smoothing is_wide",
        _linear_cross_entropy,
    ),
    NLL_LOSS: rule("self target weight reduction ignore_index", _negative_log_likelihood),
    "aten.mse_loss.default": rule("self target reduction", _elementwise),
    "aten.l1_loss.default": rule("self target reduction", _elementwise),
    "aten.smooth_l1_loss.default": rule("self target reduction beta", _elementwise),
    "aten.huber_loss.default": rule("self target reduction delta", _elementwise),
    "aten.soft_margin_loss.default": rule("self target reduction", _elementwise),
    "aten.hinge_embedding_loss.default": rule("self target margin reduction", _elementwise),
    "aten.margin_ranking_loss.default": rule("input1 input2 target margin reduction", _elementwise),
    "aten.poisson_nll_loss.default": rule(
        "input target log_input full eps reduction", _elementwise
    ),
    "aten.kl_div.default": rule("self target reduction log_target", _elementwise),
    "aten.binary_cross_entropy.default": rule("self target weight reduction", _elementwise),
    "aten.binary_cross_entropy_with_logits.default": rule(
        "self target weight pos_weight reduction", _elementwise
    ),
    "aten.cosine_embedding_loss.default": rule("input1 input2 target margin reduction", _of_rows),
    "aten.triplet_margin_loss.default": rule(
        "anchor positive negative margin p eps swap reduction", _of_rows
    ),
    "aten.cosine_similarity.default": rule("x1 x2 dim eps", _similarity),
    "aten.pairwise_distance.default": rule("x1 x2 p eps keepdim", _distance),
}
