"""Rules of ops that look along a dim: sums (the dim is summed) and all that need it unsharded."""

from collections.abc import Sequence
from dataclasses import replace

from meshfold.ir.op_graph import Value
from meshfold.passes.rules.ops.labels import (
    BoundOp,
    Dims,
    OpLabels,
    RuleComm,
    Special,
    numbered,
    rule,
)


def _reduced_dims(op: BoundOp, rank: int) -> tuple[int, ...]:
    """The dims of argument `dim`; all if it is absent or empty."""
    return tuple(d % max(rank, 1) for d in op.integers("dim")) or tuple(range(rank))


def _without_reduced(labels: Dims, reduced: Sequence[int], out: Value) -> Dims:
    """Labels of a result without the reduced dims, or with size-1 dims in their place."""
    if len(out.shape) == len(labels):
        return tuple(None if d in reduced else p for d, p in enumerate(labels))
    return tuple(p for d, p in enumerate(labels) if d not in reduced)


def _sum(op: BoundOp) -> OpLabels:
    labels = numbered(op.values[0].shape)
    reduced = _reduced_dims(op, len(labels))
    summed = frozenset(f"d{d}" for d in reduced)
    out = _without_reduced(labels, reduced, op.outputs[0])
    linear = (frozenset({0}),) if op.values[0].is_float else ()
    return OpLabels((labels,), (out,), summed=summed, linear=linear)


def _mean(op: BoundOp) -> OpLabels:
    """A sum, divided by the global count."""
    spec = _sum(op)
    special = {label: Special(local="mean") for label in spec.summed}
    return OpLabels(
        spec.inputs,
        spec.outputs,
        spec.summed,
        linear=spec.linear,
        special=special,
    )


def _unsharded_reduction(op: BoundOp) -> OpLabels:
    """Maxima, minima, norms, any, all, argmax: reduced dims unsharded, the others as they are."""
    labels = numbered(op.values[0].shape)
    reduced = _reduced_dims(op, len(labels))
    inputs = tuple(None if d in reduced else p for d, p in enumerate(labels))
    return OpLabels((inputs,), tuple(_without_reduced(inputs, reduced, v) for v in op.outputs))


def _chosen_along(op: BoundOp) -> OpLabels:
    """kthvalue, mode: a dim of its own default, the last."""
    rank = len(op.values[0].shape)
    dim = op.dim("dim", rank, -1)
    inputs = numbered(op.values[0].shape, but=(dim,))
    return OpLabels((inputs,), tuple(_without_reduced(inputs, (dim,), v) for v in op.outputs))


def _per_slice(op: BoundOp) -> OpLabels:
    """renorm: slices along `dim`, each unsharded."""
    shape = op.values[0].shape
    dim = op.dim("dim", len(shape))
    labels = numbered(shape, but=[d for d in range(len(shape)) if d != dim])
    return OpLabels((labels,), (labels,))


def _along(op: BoundOp) -> OpLabels:
    """softmax, topk, sort: `dim` (default the last) unsharded, all results alike."""
    rank = len(op.values[0].shape)
    labels = numbered(op.values[0].shape, but=(op.dim("dim", rank, -1),))
    return OpLabels((labels,), (labels,) * len(op.outputs))


def _softmax(op: BoundOp) -> OpLabels:
    """Rows beyond the end of another dim have sums of their own."""
    spec = _along(op)
    return replace(spec, keeps_padding=frozenset(spec.names))


def _scan(op: BoundOp) -> OpLabels:
    """cumsum: linear too. Along a sharded dim ranks add the sums of those before them."""
    value, out = op.values[0], op.outputs[0]
    labels = numbered(value.shape)
    linear = (frozenset({0}),) if value.is_float else ()
    special = {}
    if labels:
        dim = op.dim("dim", len(labels), -1)
        row_bytes = out.num_bytes // max(value.shape[dim], 1)
        comm = [RuleComm("all_reduce", row_bytes)]
        if out.requires_grad:
            comm.append(RuleComm("all_reduce", row_bytes, is_backward=True))
        special[f"d{dim}"] = Special(local="cumsum", comm=tuple(comm))
    return OpLabels((labels,), (labels,), linear=linear, special=special)


def _difference(op: BoundOp) -> OpLabels:
    """diff: `dim` unsharded in self, prepend and append."""
    rank = len(op.values[0].shape)
    labels = numbered(op.values[0].shape, but=(op.dim("dim", rank, -1),))
    together = frozenset(range(len(op.values)))
    return OpLabels((labels,) * len(op.values), (labels,), linear=(together,))


def _normalization(op: BoundOp) -> OpLabels:
    """layer_norm, rms_norm: the normalized dims unsharded; weight and bias have only those."""
    x = op.value("input").shape
    first = len(x) - len(op.integers("normalized_shape"))
    labels = numbered(x, but=range(first, len(x)))
    unlabelled: Dims = (None,) * (len(x) - first)
    affine = len(op.positions("weight")) + len(op.positions("bias"))
    outputs = [labels] + [labels] * (len(op.outputs) - 1)
    return OpLabels((labels, *[unlabelled] * affine), tuple(outputs))


REDUCTION_RULES = {
    "aten.sum.dim_IntList": rule("self dim keepdim dtype", _sum),
    "aten.sum.default": rule("self dtype", _sum),
    "aten.mean.dim": rule("self dim keepdim dtype", _mean),
    "aten.mean.default": rule("self dtype", _mean),
    "aten.amax.default": rule("self dim keepdim", _unsharded_reduction),
    "aten.amin.default": rule("self dim keepdim", _unsharded_reduction),
    "aten.max.default": rule("self", _unsharded_reduction),
    "aten.min.default": rule("self", _unsharded_reduction),
    "aten.max.dim": rule("self dim keepdim", _unsharded_reduction),
    "aten.min.dim": rule("self dim keepdim", _unsharded_reduction),
    "aten.argmax.default": rule("self dim keepdim", _unsharded_reduction),
    "aten.argmin.default": rule("self dim keepdim", _unsharded_reduction),
    "aten.any.default": rule("self", _unsharded_reduction),
    "aten.any.dim": rule("self dim keepdim", _unsharded_reduction),
    "aten.all.default": rule("self", _unsharded_reduction),
    "aten.all.dim": rule("self dim keepdim", _unsharded_reduction),
    "aten.logsumexp.default": rule("self dim keepdim", _unsharded_reduction),
    "aten.var.correction": rule("self dim correction keepdim", _unsharded_reduction),
    "aten.std.correction": rule("self dim correction keepdim", _unsharded_reduction),
    "aten.var_mean.correction": rule("self dim correction keepdim", _unsharded_reduction),
    "aten.std_mean.correction": rule("self dim correction keepdim", _unsharded_reduction),
    "aten.prod.default": rule("self dtype", _unsharded_reduction),
    "aten.prod.dim_int": rule("self dim keepdim dtype", _unsharded_reduction),
    "aten.nansum.default": rule("self dim keepdim dtype", _unsharded_reduction),
    "aten.aminmax.default": rule("self dim keepdim", _unsharded_reduction),
    "aten.median.default": rule("self", _unsharded_reduction),
    "aten.median.dim": rule("self dim keepdim", _unsharded_reduction),
    "aten.kthvalue.default": rule("self k dim keepdim", _chosen_along),
    "aten.mode.default": rule("self dim keepdim", _chosen_along),
    "aten.quantile.scalar": rule("self q dim keepdim interpolation", _unsharded_reduction),
    "aten.nanquantile.scalar": rule("self q dim keepdim interpolation", _unsharded_reduction),
    "aten.renorm.default": rule("self p dim maxnorm", _per_slice),
    "aten.count_nonzero.default": rule("self dim", _unsharded_reduction),
    "aten.count_nonzero.dim_IntList": rule("self dim", _unsharded_reduction),
    "aten.linalg_vector_norm.default": rule("self ord dim keepdim dtype", _unsharded_reduction),
    "aten.softmax.int": rule("self dim dtype", _softmax),
    "aten._softmax.default": rule("self dim half_to_float", _softmax),
    "aten.log_softmax.int": rule("self dim dtype", _along),
    "aten._log_softmax.default": rule("self dim half_to_float", _along),
    "aten.topk.default": rule("self k dim largest sorted", _along),
    "aten.sort.default": rule("self dim descending", _along),
    "aten.argsort.default": rule("self dim descending", _along),
    "aten.cumprod.default": rule("self dim dtype", _along),
    "aten.logcumsumexp.default": rule("self dim", _along),
    "aten.cummax.default": rule("self dim", _along),
    "aten.cummin.default": rule("self dim", _along),
    "aten.cumsum.default": rule("self dim dtype", _scan),
    "aten.diff.default": rule("self n dim prepend append", _difference),
    "aten.layer_norm.default": rule(
        "input normalized_shape weight bias eps cudnn_enable", _normalization
    ),
    "aten.rms_norm.default": rule("input normalized_shape weight eps", _normalization),
    "meshfold.rms_norm.default": rule("input normalized_shape weight eps", _normalization),
}
