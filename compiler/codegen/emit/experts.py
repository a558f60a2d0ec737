"""Emission of products with experts, and of the way of their rows there and back.

expert_linear    the local experts, then the op on these
dispatch         route (once per ids), rows by expert, start, wait; of ids what the route says
combine          start, wait, rows as they were
"""

from torch import fx

from meshfold.codegen.emit.op_context import OpContext
from meshfold.ir.spmd import Layout, local_shape
from meshfold.ops import local_implementations as local_ops
from meshfold.ops.expert_dispatch import (
    as_before,
    by_expert,
    routed,
    start_combine,
    start_dispatch,
    wait_combine,
    wait_dispatch,
)
from meshfold.ops.registry import torch_target


def expert_linear(context: OpContext) -> list[fx.Node]:
    """The op on the local experts."""
    named = context.named()
    shape, layout = (
        context.op_graph.values[context.op.operands[1]].shape,
        context.typing.inputs[1],
    )
    num_local = local_shape(shape, layout, context.mesh.sizes)[0]
    named["ids"] = context.call(
        local_ops.local_experts,
        context.step_node,
        named["ids"],
        shape[0],
        num_local,
        context.digits(layout, 0),
    )
    arguments = (named[name] for name in ("x", "weight", "ids"))
    rest = named.get("bias"), named.get("transposed", False)
    return [context.call(torch_target(context.op.target), *arguments, *rest)]


def dispatch(context: OpContext) -> list[fx.Node]:
    rows, ids = context.operands
    if (axis := _experts_axis(context, context.typing.outputs[0])) is None:
        return [rows]
    route = _route(context, axis)
    if rows is ids:
        return [context.call(getattr, route, "experts")]
    leaving = context.call(by_expert, rows, route)
    start = context.call(start_dispatch, context.step_node, leaving, axis, route)
    return [context.call(wait_dispatch, context.step_node, start, axis, route)]


def combine(context: OpContext) -> list[fx.Node]:
    rows, _ = context.operands
    if (axis := _experts_axis(context, context.typing.inputs[0])) is None:
        return [rows]
    route = _route(context, axis)
    start = context.call(start_combine, context.step_node, rows, axis, route)
    back = context.call(wait_combine, context.step_node, start, axis, route)
    return [context.call(as_before, back, route)]


def _experts_axis(context: OpContext, layout: Layout) -> str | None:
    """The axis on which `layout` has rows at their experts."""
    axes = (name for name, t in zip(context.mesh.names, layout, strict=True) if t.kind == "E")
    return next(axes, None)


def _route(context: OpContext, axis: str) -> fx.Node:
    """The route of the ids that an op reads: one for all that read the same."""
    ids = context.operands[1]
    arguments = (context.step_node, ids, context.op.args[2], axis)
    known = (n for n in ids.users if n.target is routed and n.args == arguments)
    return next(known, None) or context.call(routed, *arguments)
