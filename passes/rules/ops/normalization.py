"""Rules of norms over channels: batch norm, group norm, instance norm.

Batch norm in training mode takes its statistics over the whole batch. Channels are independent of
each other; where the batch is sharded, means and variances are all-reduced in the local
implementation (meshfold.ops.batch_norm) and their term of the gradient in its backward, so that
every rank normalizes with the numbers of one process. The new running statistics then leave
Invariant. With given statistics (eval mode) it is elementwise.
"""

from meshfold.ir.op_graph import ITEM_BYTES
from meshfold.ir.spmd import INVARIANT
from meshfold.passes.rules.ops.labels import (
    BoundOp,
    Dims,
    OpLabels,
    RuleComm,
    Special,
    dim_label,
    rule,
)

STATISTICS_BYTES = ITEM_BYTES["float32"]
"""Statistics of narrower floats are taken in float32."""

_CHANNELS: Dims = (dim_label("c"),)


def _channels_second(op: BoundOp) -> Dims:
    """x [batch, c, ...]: what follows the channels is unsharded."""
    rank = len(op.value("input").shape)
    return (dim_label("d0"), dim_label("c"), *(None,) * (rank - 2))


def _trained_batch_norm(op: BoundOp) -> OpLabels | None:
    """x [batch, c, ...]; weight, bias and statistics, old and new, [c].

    Forward sums x, then its squared distance from the mean; backward the gradient, and the gradient
    times the normalized x, in one collective.
    """
    if op.get("training") is not True:
        return None
    x, labels = op.value("input"), _channels_second(op)
    statistics = x.shape[1] * max(ITEM_BYTES[x.dtype], STATISTICS_BYTES)
    comm = [RuleComm("all_reduce", statistics)] * 2
    if x.requires_grad:
        comm.append(RuleComm("all_reduce", 2 * statistics, is_backward=True))
    batch = Special(output=INVARIANT, local="batch_norm", comm=tuple(comm))
    return OpLabels(
        (labels, *(_CHANNELS,) * (len(op.values) - 1)),
        (labels, *(_CHANNELS,) * (len(op.outputs) - 1)),
        special={"d0": batch},
        local="batch_norm",
    )


def _given_batch_norm(op: BoundOp) -> OpLabels:
    """Statistics are operands; those of the batch come out empty."""
    labels = _channels_second(op)
    empty = Special(output=INVARIANT)
    return OpLabels(
        (labels, *(_CHANNELS,) * (len(op.values) - 1)),
        (labels, *((None,),) * (len(op.outputs) - 1)),
        special={"d0": empty, "c": empty},
    )


def _group_norm(op: BoundOp) -> OpLabels:
    """No group of channels is split."""
    labels = _channels_second(op)
    affine = (_CHANNELS,) * (len(op.values) - 1)
    groups = {"c": op.integer("num_groups")}
    return OpLabels((labels, *affine), (labels,), granularity=groups)


def _instance_norm(op: BoundOp) -> OpLabels | None:
    """Statistics of every sample and channel alone. Without running ones: the op changes them in
    place, unseen by the graph."""
    if op.has_tensor("running_mean") or op.get("use_input_stats") is not True:
        return None
    labels = _channels_second(op)
    affine = (_CHANNELS,) * (len(op.values) - 1)
    return OpLabels((labels, *affine), (labels,))


def _weight_norm(op: BoundOp) -> OpLabels:
    """v * g / |v| with a norm for every index of `dim`; g is v's shape with 1 elsewhere."""
    rank = len(op.value("v").shape)
    dim = op.integer("dim") % rank if op.get("dim") is not None else 0
    labels: Dims = tuple(dim_label("c") if k == dim else None for k in range(rank))
    return OpLabels((labels, labels), (labels,))


NORMALIZATION_RULES = {
    "aten._native_batch_norm_legit_functional.default": rule(
        "input weight bias running_mean running_var training momentum eps", _trained_batch_norm
    ),
    "aten._native_batch_norm_legit.no_stats": rule(
        "input weight bias training momentum eps", _trained_batch_norm
    ),
    "aten._native_batch_norm_legit_no_training.default": rule(
        "input weight bias running_mean running_var momentum eps", _given_batch_norm
    ),
    "aten.group_norm.default": rule("input num_groups weight bias eps cudnn_enabled", _group_norm),
    "aten.instance_norm.default": rule(
        "input weight bias running_mean running_var use_input_stats momentum eps cudnn_enabled",
        _instance_norm,
    ),
    "aten._weight_norm.default": rule("v g dim", _weight_norm),
}
