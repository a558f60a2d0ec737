"""Split backward: gradients of inputs (B), and deferred weight gradients (dW) behind them (W).

What the stage before waits for is the gradient of its outputs. Half of the work of a linear layer,
the product that computes its weight gradient, can be deferred (Qi et al., Zero Bubble Pipeline
Parallelism, ICLR 2024). In the graphs of such a schedule

    linear, addmm, mm, expert_linear  become ops whose backward computes the gradient of the input,
                                      that of the weight is left to the step's DeferredWeightGrads
    parameters                        are read through taps
                                      (meshfold.distributed.deferred_weight_grads): a gradient that
                                      arrives at one is deferred

so B ends at the taps and W goes on behind them: it computes the deferred products, and autograd
takes all gradients through the buckets (meshfold.zero.step) to `.grad`. Nothing else is deferred,
and nothing is computed twice: gradients of norms, biases and embeddings are small and belong to B.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from meshfold.codegen.program.emitted import PLACE
from meshfold.codegen.program.region_schedule import RegionSegment
from meshfold.cost_models.op_costs.compute import MATMUL_FACTORS, op_name
from meshfold.distributed.deferred_weight_grads import DeferredWeightGrads
from meshfold.distributed.step_context import StepContext
from meshfold.ir.op_graph import OpGraph, SlotKind
from meshfold.ops import expert_linear as expert_ops
from meshfold.passes.price.weight_gradients import SPLIT


def linear(context: StepContext, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., k], weight [n, k], bias [n] -> [..., n]."""
    if context.deferred is None:
        return functional.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, True, context.deferred)  # type: ignore[no-any-return, no-untyped-call]


def addmm(context: StepContext, bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """bias [n], x [rows, k], weight [k, n] -> [rows, n]."""
    if context.deferred is None:
        return torch.addmm(bias, x, weight)
    return _Linear.apply(x, weight, bias, False, context.deferred)  # type: ignore[no-any-return, no-untyped-call]


def mm(context: StepContext, x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, k], weight [k, n] -> [rows, n]."""
    if context.deferred is None:
        return torch.mm(x, weight)
    return _Linear.apply(x, weight, None, False, context.deferred)  # type: ignore[no-any-return, no-untyped-call]


def expert_linear(
    context: StepContext,
    x: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    """meshfold.ops.expert_linear.expert_linear, whose weight gradient can be deferred."""
    if context.deferred is None:
        y: Tensor = expert_ops.expert_linear(x, weight, ids, bias, transposed)
        return y
    return _ExpertLinear.apply(x, weight, ids, bias, transposed, context.deferred)  # type: ignore[no-any-return, no-untyped-call]


class _Linear(torch.autograd.Function):
    """is_rows: the weight is [n, k], else [k, n]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        is_rows: bool,
        deferred: DeferredWeightGrads,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.deferred, ctx.is_rows = deferred, is_rows
        # Its values are for B, its place in autograd's graph is for W.
        ctx.weight = get_gradient_edge(weight) if weight.requires_grad else None
        return functional.linear(x, weight if is_rows else weight.t(), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        num_rows = gradient.shape[:-1].numel()  # -1 is not known of no features
        rows = gradient.reshape(num_rows, gradient.shape[-1])
        if needs_weight and ctx.weight is not None:
            # Detached: what comes before x in the graph need not wait for W.
            # Of complex numbers the other factor is conjugated; of real ones that is itself.
            inputs = x.detach().reshape(num_rows, x.shape[-1]).conj()
            left, right = (rows.t(), inputs) if ctx.is_rows else (inputs.t(), rows)
            ctx.deferred.defer(
                ctx.weight,
                lambda into: left @ right if into is None else into.addmm_(left, right),
            )
        factor = (weight if ctx.is_rows else weight.t()).conj()
        to_x = gradient @ factor if needs_x else None
        return to_x, None, rows.sum(0) if needs_bias else None, None, None


class _ExpertLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        ids: Tensor,
        bias: Tensor | None,
        transposed: bool,
        deferred: DeferredWeightGrads,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ids)
        ctx.deferred, ctx.transposed = deferred, transposed
        ctx.weight = get_gradient_edge(weight) if weight.requires_grad else None
        y: Tensor = expert_ops.expert_linear(x, weight, ids, bias, transposed)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ids = ctx.saved_tensors
        needs_x, needs_weight, _, needs_bias, *_ = ctx.needs_input_grad
        transposed = ctx.transposed
        if needs_weight and ctx.weight is not None:
            # W needs the shape of the weights alone, and does not keep them.
            shape, inputs = weight.shape, x.detach()
            ctx.deferred.defer(
                ctx.weight,
                lambda into: expert_ops.weight_gradient(
                    gradient, inputs, shape, ids, transposed, into
                ),
            )
        found = iter(
            expert_ops.expert_linear_backward(
                gradient, x, weight, ids, transposed, [needs_x, False, needs_bias]
            )
        )
        to_x = next(found) if needs_x else None
        return to_x, None, None, next(found) if needs_bias else None, None, None


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function for function in (linear, addmm, mm, expert_linear)
}
"""Name of a product (SPLIT) -> the function that replaces it."""


_VIEWS = frozenset(
    f"aten.{name}"
    for name in ("t.default", "transpose.int", "permute.default", "view.default", "reshape.default")
)


def split_backward(module: fx.GraphModule, ops: OpGraph) -> list[fx.Node]:
    """Let a graph of a region, whose ops are `ops`, defer weight gradients. Its first placeholder
    is the StepContext. Returns the products that now do."""
    graph, found = module.graph, []
    context_node = next(iter(graph.nodes))
    for node in list(graph.nodes):
        name = op_name(str(node.target)) if str(node.target).endswith(".default") else ""
        if name not in SPLIT or node.kwargs:
            continue
        if not _is_weight(node.args[MATMUL_FACTORS[name][-1]], ops):
            continue
        with graph.inserting_before(node):
            split = graph.call_function(_FUNCTIONS[name], (context_node, *node.args))
        split.meta = dict(node.meta)
        node.replace_all_uses_with(split)
        graph.erase_node(node)
        found.append(split)
    module.recompile()
    return found


def weight_of(product: fx.Node) -> fx.Node:
    """The weight of a product that split_backward has returned."""
    name = next(name for name, function in _FUNCTIONS.items() if function is product.target)
    weight = product.args[1 + MATMUL_FACTORS[name][-1]]
    assert isinstance(weight, fx.Node)
    return weight


def deferred_names(segment: RegionSegment) -> set[str]:
    """The inputs of a segment whose gradients its W computes, once split_backward has changed its
    graph: the weights of its products, or what these are views of."""
    if segment.kind != "ops":
        return set()
    nodes = segment.graph.graph.nodes
    left = [weight_of(node) for node in nodes if node.target in _FUNCTIONS.values()]
    found: set[fx.Node] = set()
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    placeholders = (node for node in nodes if node.op == "placeholder")
    pairs = zip(segment.inputs, placeholders, strict=True)
    return {name for name, node in pairs if node in found}


def _is_weight(node: Any, ops: OpGraph) -> bool:
    """Whether a value is a trained parameter or a view of one. Other ops save tensors for
    their backward, which autograd visits in B and frees: W could not run it a second time."""
    if not isinstance(node, fx.Node) or PLACE not in node.meta:
        return False
    v = node.meta[PLACE][0]
    while (k := ops.producers[v]) >= 0 and ops.ops[k].target in _VIEWS:
        v = ops.ops[k].operands[0]
    is_parameter = v < len(ops.slots) and ops.slots[v].kind is SlotKind.PARAMETER
    return is_parameter and ops.values[v].requires_grad
