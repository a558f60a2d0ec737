"""One op on its way into an emitted graph: its nodes, its layouts, its arguments by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import Arg, Hole, Op, OpGraph, Ref, Symbol
from meshfold.ir.spmd import Layout
from meshfold.ir.strategy import OpTyping
from meshfold.ops import local_implementations as local_ops
from meshfold.passes.rules.table import OP_RULES
from meshfold.sharding.indices import ShardDigits
from meshfold.torch_compat.dtypes import torch_dtype


@dataclass(frozen=True)
class OpContext:
    """One op on its way into `graph`."""

    graph: fx.Graph
    step_node: fx.Node
    """The StepContext, first argument of local implementations."""
    op_graph: OpGraph
    op_index: int
    typing: OpTyping
    operands: Sequence[fx.Node]
    """Nodes in the layouts of the typing, in the order of op.operands."""
    mesh: Mesh
    site: fx.Node | int
    """The number of the instance, which tells random ops apart: node or number."""
    floats: Sequence[fx.Node] = ()
    """Nodes of the region's float holes."""

    @property
    def op(self) -> Op:
        return self.op_graph.ops[self.op_index]

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(function, args, kwargs)

    def digits(self, layout: Layout, dim: int) -> ShardDigits:
        """(axis, blocks, unit) of the axes that shard `dim`."""
        named = zip(self.mesh.names, layout, strict=True)
        return tuple((name, t.blocks, t.unit) for name, t in named if t.is_shard and t.dim == dim)

    def all_digits(self, layout: Layout, rank: int) -> tuple[ShardDigits, ...]:
        return tuple(self.digits(layout, d) for d in range(rank))

    def named(self) -> dict[str, Any]:
        """Global arguments by name, tensors as nodes."""
        nodes = iter(self.operands)
        arguments = global_arguments(self.op)
        return {name: self.realize(arg, nodes) for name, arg in arguments.items()}

    def realize(self, arg: Arg, nodes: Any) -> Any:
        """An argument as fx takes it; references take the next of `nodes`."""
        match arg:
            case Ref():
                return next(nodes)
            case Hole():
                return self.floats[arg.index]
            case tuple():
                return [self.realize(a, nodes) for a in arg]
            case Symbol(kind="device"):
                return self.call(getattr, self.step_node, "device")
            case Symbol(kind="dtype"):
                return torch_dtype(arg.text)
            case Symbol(kind="microbatch"):
                return self.call(getattr, self.step_node, "microbatch")
            case Symbol(kind="count"):
                return self.call(
                    local_ops.targets_of_step, self.step_node, self.site, int(arg.text)
                )
            case Symbol(kind="complex"):
                return complex(arg.text)
            case Symbol():
                return getattr(torch, arg.text)
        return arg


def global_arguments(op: Op) -> dict[str, Arg]:
    """Arguments by name, of the unsharded op."""
    names = OP_RULES[op.target].parameters
    return dict(zip(names, op.args, strict=False)) | dict(op.kwargs)
