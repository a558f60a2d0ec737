"""Emission of one op: the torch op on local shapes, or a local implementation that its rules ask
for.

    AxisRule.local    emitted as
    "plain"           the torch op, sizes localized
    "mean"            the torch op, then divide_by_ranks for the axes that shard a reduced dim
    others            the function of meshfold.ops.local_implementations, which takes all axes at
                      once; the torch op where that work is not needed (attention without
                      dropout, say)
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from meshfold.codegen.emit.experts import combine, dispatch, expert_linear
from meshfold.codegen.emit.op_context import OpContext
from meshfold.errors import UnsupportedOpError
from meshfold.ir.op_graph import UNIFORM, Draw
from meshfold.ir.spmd import local_shape
from meshfold.ops import local_implementations as local_ops
from meshfold.ops.batch_norm import batch_norm, batch_norm_without_running
from meshfold.ops.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from meshfold.ops.distributed_cumsum import cumsum
from meshfold.ops.distributed_index import put_rows, take_rows
from meshfold.ops.draws import local_draw
from meshfold.ops.embedding_bag import local_bags
from meshfold.ops.functions import FunctionOp
from meshfold.ops.registry import draws, op_function
from meshfold.ops.ring_attention import ring_attention
from meshfold.passes.rules.localize import localize
from meshfold.passes.rules.ops.collective_matmul import ring_of
from meshfold.passes.rules.ops.loss import NARROW_CROSS_ENTROPY
from meshfold.passes.rules.ops.random import may_draw
from meshfold.passes.rules.table import op_labels, rule_locals, summed_axes
from meshfold.sharding.indices import ShardDigits

_REDUCTIONS = ("none", "mean", "sum")


def emit_op(context: OpContext) -> list[fx.Node]:
    """Appends the op to its graph; returns one node per output.

    Raises UnsupportedOpError for an op that draws random numbers in a way that ranks would not
    agree on, or that this torch does not have.
    """
    locals_ = rule_locals(context.op_graph, context.op_index, context.typing)
    wanted = {local for local in locals_ if local != "plain"}
    if not wanted:
        return _plain(context)
    (local,) = wanted
    return _EMITTERS[local](context)


def _plain(context: OpContext) -> list[fx.Node]:
    """The torch op on local shapes."""
    function: Any = op_function(context.op)
    if draws(context.op.target, context.op.args, context.op.kwargs):
        raise UnsupportedOpError(
            f"{context.op.target} draws random numbers, which ranks would not agree on; switch it "
            "off in the model's configuration, or draw outside the model and pass the numbers in",
            op=context.op.target,
            source=context.op.source,
        )
    op = context.op
    args, kwargs = localize(context.op_graph, context.op_index, context.typing, context.mesh.sizes)
    nodes = iter(context.operands)
    real_args = [context.realize(a, nodes) for a in args]
    real_kwargs = {name: context.realize(a, nodes) for name, a in kwargs}
    result = context.call(function, *real_args, **real_kwargs)
    if not _returns_many(function):
        return [result]
    return [context.call(operator.getitem, result, k) for k in range(len(op.outputs))]


def _returns_many(function: Any) -> bool:
    """Whether an op returns a list or several tensors, as a Function does."""
    if isinstance(function, FunctionOp):
        return True
    returns = function._schema.returns
    return len(returns) > 1 or str(returns[0].type) != "Tensor"


def _mean(context: OpContext) -> list[fx.Node]:
    (local,) = _plain(context)
    shared = summed_axes(context.op_graph, context.op_index, context.typing)
    axes = tuple(context.mesh.names[k] for k in shared)
    return [context.call(local_ops.divide_by_ranks, context.step_node, local, axes)]


def _reshape(context: OpContext) -> list[fx.Node]:
    shape = context.op_graph.values[context.op.outputs[0]].shape
    shape = local_shape(shape, context.typing.outputs[0], context.mesh.sizes)
    return [context.call(local_ops.reshape, context.step_node, context.operands[0], shape)]


def _valid_rows(context: OpContext) -> list[fx.Node]:
    """The torch op without the padding rows of the dims that it sums."""
    labels = op_labels(context.op_graph, context.op)
    assert labels is not None
    operands = list(context.operands)
    for k, (layout, dims) in enumerate(zip(context.typing.inputs, labels.inputs, strict=True)):
        for t in layout:
            if t.padded and (dims[t.dim] or ("",))[0] in labels.drops_padding:
                size = context.op_graph.values[context.op.operands[k]].shape[t.dim]
                digits = context.digits(layout, t.dim)
                operands[k] = context.call(
                    local_ops.valid_rows, context.step_node, operands[k], t.dim, size, digits
                )
    return _plain(replace(context, operands=operands))


def _embedding(context: OpContext) -> list[fx.Node]:
    named = context.named()
    weight = context.op_graph.values[context.op.operands[0]]
    layout = context.typing.inputs[0]
    return [
        context.call(
            local_ops.embedding,
            context.step_node,
            named["weight"],
            named["indices"],
            named.get("padding_idx", -1),
            weight.shape[0],
            context.digits(layout, 0),
        )
    ]


def _embedding_bag(context: OpContext) -> list[fx.Node]:
    named = context.named()
    table = context.op_graph.values[context.op.operands[0]]
    tensors = (named.get(name) for name in ("table", "ids", "offsets", "weights"))
    settings = ("mode", 0), ("include_last_offset", False), ("padding_idx", -1)
    return [
        context.call(
            local_bags,
            context.step_node,
            *tensors,
            *(named.get(name, default) for name, default in settings),
            table.shape[0],
            context.digits(context.typing.inputs[0], 0),
        )
    ]


def _scan(context: OpContext) -> list[fx.Node]:
    named = context.named()
    x = context.op_graph.values[context.op.operands[0]]
    dim = named["dim"] % max(len(x.shape), 1)
    digits = context.digits(context.typing.inputs[0], dim) if x.shape else ()
    if not digits:
        return _plain(context)
    size = x.shape[dim]
    dtype = named.get("dtype")
    return [context.call(cumsum, context.step_node, named["self"], dim, dtype, size, digits)]


def _put_rows(context: OpContext) -> list[fx.Node]:
    """Rows added to, or put into, those of a tensor that is sharded by rows."""
    into = context.typing.inputs[0]
    digits = context.digits(into, 0)
    if not digits:
        return _plain(context)
    named = context.named()
    if context.op.target == "aten.index_add.default":
        indices, rows, adds = [named["index"]], named["source"], True
        scale = named.get("alpha", 1)
    else:
        indices, rows, adds = named["indices"], named["values"], named.get("accumulate", False)
        scale = 1
    size = context.op_graph.values[context.op.operands[0]].shape[0]
    x = named["self"]
    return [context.call(put_rows, context.step_node, x, indices, rows, adds, scale, size, digits)]


def _take_rows(context: OpContext) -> list[fx.Node]:
    """Rows of a tensor that is sharded by rows."""
    digits = context.digits(context.typing.inputs[0], 0)
    if not digits:
        return _plain(context)
    named = context.named()
    indices = named["indices"] if "indices" in named else [named["index"]]
    size = context.op_graph.values[context.op.operands[0]].shape[0]
    return [context.call(take_rows, context.step_node, named["self"], indices, size, digits)]


def _loss_arguments(named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Weights of classes, reduction, the target that is ignored, smoothing."""
    reduction = _REDUCTIONS[named.get("reduction", 1)]
    others = named.get("ignore_index", -100), named.get("label_smoothing", 0.0)
    return named.get("weight"), reduction, *others


def _cross_entropy(context: OpContext) -> list[fx.Node]:
    named = context.named()
    logits = context.op_graph.values[context.op.operands[0]]
    rows = summed_axes(context.op_graph, context.op_index, context.typing)
    wide = {"is_wide": True} if context.op.target == NARROW_CROSS_ENTROPY else {}
    return [
        context.call(
            local_ops.cross_entropy,
            context.step_node,
            named["self"],
            named["target"],
            *_loss_arguments(named),
            logits.shape[1],
            context.digits(context.typing.inputs[0], 1),
            tuple(context.mesh.names[k] for k in rows),
            **wide,
        )
    ]


def _linear_cross_entropy(context: OpContext) -> list[fx.Node]:
    named = context.named()
    rows = summed_axes(context.op_graph, context.op_index, context.typing)
    return [
        context.call(
            local_ops.linear_cross_entropy,
            context.step_node,
            *(named.get(name) for name in ("input", "matrix", "target", "bias")),
            *_loss_arguments(named),
            named.get("is_wide", False),
            context.op_graph.values[context.op.operands[1]].shape[0],
            context.digits(context.typing.inputs[1], 0),
            tuple(context.mesh.names[k] for k in rows),
        )
    ]


def _nll_loss(context: OpContext) -> list[fx.Node]:
    named = context.named()
    rows = summed_axes(context.op_graph, context.op_index, context.typing)
    return [
        context.call(
            local_ops.nll_loss,
            context.step_node,
            named["self"],
            named["target"],
            named.get("weight"),
            named.get("ignore_index", -100),
            tuple(context.mesh.names[k] for k in rows),
        )
    ]


def _drawn(context: OpContext) -> tuple[tuple[fx.Node | int, int], tuple[int, int, int]]:
    """What a random op draws and its microbatch: (site, batch_slice) of local_ops."""
    draw = context.op.draw or Draw(context.op_index)
    return (context.site, draw.number), (draw.dim, draw.blocks, draw.microbatches)


def _dropout(context: OpContext) -> list[fx.Node]:
    named = context.named()
    if not may_draw(context.op.target, named):
        return _plain(context)
    op, layout = context.op, context.typing.outputs[0]
    shape = context.op_graph.values[op.outputs[0]].shape
    site, batch_slice = _drawn(context)
    digits = context.all_digits(layout, len(shape))
    several = len(op.outputs) > 1
    function = local_ops.native_dropout if several else local_ops.dropout
    result = context.call(
        function, context.step_node, named["input"], named["p"], site, shape, digits, batch_slice
    )
    return [context.call(operator.getitem, result, k) for k in range(2)] if several else [result]


def _draw(context: OpContext) -> list[fx.Node]:
    named, op, layout = context.named(), context.op, context.typing.outputs[0]
    shape = context.op_graph.values[op.outputs[0]].shape
    kind = "uniform" if op.target == UNIFORM else "normal"
    site, batch_slice = _drawn(context)
    digits = context.all_digits(layout, len(shape))
    what = kind, named["dtype"], site, shape, digits, batch_slice, named.get("alike", False)
    return [context.call(local_draw, context.step_node, *what)]


def _batch_norm(context: OpContext) -> list[fx.Node]:
    named = context.named()
    x = context.typing.inputs[0]
    axes = tuple(axis for axis, *_ in context.digits(x, 0))
    tensors = [named[name] for name in ("input", "weight", "bias")]
    statistics: list[Any] = []
    function: Callable[..., Any] = batch_norm_without_running
    if "running_mean" in named:
        function = batch_norm
        statistics = [named[name] for name in ("running_mean", "running_var", "momentum")]
    result = context.call(function, context.step_node, *tensors, *statistics, named["eps"], axes)
    return [context.call(operator.getitem, result, k) for k in range(len(context.op.outputs))]


def _attention(context: OpContext) -> list[fx.Node]:
    op, typing = context.op, context.typing
    named = context.named()
    query, key = (context.op_graph.values[v].shape for v in op.operands[:2])
    query_layout, key_layout = typing.inputs[:2]
    heads = len(query) - 3
    num_key_heads = key[heads] if heads > 0 else 1
    key_digits = context.digits(key_layout, heads) if heads > 0 else ()
    if ring := context.digits(key_layout, len(key) - 2):
        return [_ring_attention(context, named, ring, (num_key_heads, key_digits))]
    query_digits = context.digits(query_layout, heads) if heads > 0 else ()
    # Padded query heads have a granularity of those that share a key head.
    picks_heads = [d[:2] for d in query_digits] != [d[:2] for d in key_digits]
    causal_shard = named.get("is_causal", False) and context.digits(query_layout, len(query) - 2)
    if not (may_draw(op.target, named) or (picks_heads and num_key_heads > 1) or causal_shard):
        return _plain(context)
    scores = (*query[:-1], key[-2])
    site, batch_slice = _drawn(context)
    return [
        context.call(
            local_ops.attention,
            context.step_node,
            *(named[name] for name in ("query", "key", "value")),
            named.get("attn_mask"),
            is_causal=named.get("is_causal", False),
            scale=named.get("scale"),
            probability=named.get("dropout_p", 0.0),
            site=site,
            shape=scores,
            # Key positions are unsharded: the last dim of the scores has no digits.
            digits=(*context.all_digits(typing.outputs[0], len(query) - 1), ()),
            batch_slice=batch_slice,
            key_heads=(num_key_heads, key_digits),
        )
    ]


def _collective_matmul(
    context: OpContext, function: Callable[..., Any], names: Sequence[str]
) -> fx.Node:
    """A call on the axis on which rows are gathered or scattered."""
    named, ring = context.named(), ring_of(context.op, context.typing, context.mesh.sizes)
    assert ring is not None, "no other rule has this emitter"
    axis, blocks = ring
    shard = named["dim"], blocks, named["transposed"], context.mesh.names[axis]
    return context.call(function, context.step_node, *(named[name] for name in names), *shard)


def _all_gather_matmul(context: OpContext) -> list[fx.Node]:
    result = _collective_matmul(context, all_gather_matmul, ("x", "weights", "biases"))
    return [context.call(operator.getitem, result, k) for k in range(len(context.op.outputs))]


def _matmul_reduce_scatter(context: OpContext) -> list[fx.Node]:
    return [_collective_matmul(context, matmul_reduce_scatter, ("x", "weight", "bias"))]


def _ring_attention(
    context: OpContext,
    named: dict[str, Any],
    key_rows: ShardDigits,
    key_heads: tuple[int, ShardDigits],
) -> fx.Node:
    query, key = (context.op_graph.values[v].shape for v in context.op.operands[:2])
    return context.call(
        ring_attention,
        context.step_node,
        *(named[name] for name in ("query", "key", "value")),
        named.get("attn_mask"),
        is_causal=named.get("is_causal", False),
        scale=named.get("scale"),
        shape=(*query[:-1], key[-2]),
        digits=(*context.all_digits(context.typing.outputs[0], len(query) - 1), ()),
        key_digits=key_rows,
        key_heads=key_heads,
    )


_EMITTERS: dict[str, Callable[[OpContext], list[fx.Node]]] = {
    "mean": _mean,
    "reshape": _reshape,
    "valid_rows": _valid_rows,
    "embedding": _embedding,
    "embedding_bag": _embedding_bag,
    "expert_linear": expert_linear,
    "dispatch": dispatch,
    "combine": combine,
    "cumsum": _scan,
    "put_rows": _put_rows,
    "take_rows": _take_rows,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "nll_loss": _nll_loss,
    "dropout": _dropout,
    "draw": _draw,
    "batch_norm": _batch_norm,
    "attention": _attention,
    "all_gather_matmul": _all_gather_matmul,
    "matmul_reduce_scatter": _matmul_reduce_scatter,
}
"""Emitters by AxisRule.local; the same keys as local_ops.LOCAL_OPS."""
