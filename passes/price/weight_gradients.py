"""How much of a region's backward only computes weight gradients: what zero_bubble defers.

Of a product with a parameter as one factor (SPLIT), the backward is two products of equal size: one
gives the gradient of the other factor (B), one that of the parameter (W). W takes the share that
its floating-point operations have in the backward of the op. Everything else is in B: sums for
biases and norms, memory-bound gradients of tables, attention, collectives, recomputation.
A split like that is assumed to cost nothing: kernels of B and W are apart anyhow (Qi et al., Zero
Bubble Pipeline Parallelism, ICLR 2024, section 2).
"""

from collections.abc import Sequence

from meshfold.cost_models.memory.put_off_bytes import PutOffFactors
from meshfold.cost_models.op_costs.compute import MATMUL_FACTORS, VIEWS, op_name, op_work
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.op_graph import Op, OpGraph, SlotKind
from meshfold.passes.price.op_time import op_time
from meshfold.passes.rules.table import AxisRule

SPLIT = frozenset({"linear", "addmm", "mm", "expert_linear"})
"""Ops whose backward is split in two (meshfold.codegen.schedule.split_backward): the last factor is
the weight."""


def weight_gradients_s(
    graph: OpGraph, rules: Sequence[Sequence[AxisRule]], costs: CostModel
) -> float:
    """Seconds per microbatch on one rank, at most the kernels of the backward. rules[o]: the axis
    rules of op o."""
    weights = trained_weights(graph)
    seconds = 0.0
    for op, of_axes in zip(graph.ops, rules, strict=True):
        share = _weight_share(graph, op, weights)
        if share:
            seconds += share * op_time(graph, op, of_axes, costs).backward_s
    return seconds


def trained_weights(graph: OpGraph) -> set[int]:
    """Values that are a trained parameter, or a view of one."""
    found = {
        i
        for i, slot in enumerate(graph.slots)
        if slot.kind is SlotKind.PARAMETER and graph.values[i].requires_grad
    }
    for op in graph.ops:
        if op_name(op.target) in VIEWS and op.operands and op.operands[0] in found:
            found.update(op.outputs)
    return found


def weight_factors(graph: OpGraph) -> dict[int, PutOffFactors]:
    """Products by number -> which of their operands are weights whose gradients W makes."""
    weights = trained_weights(graph)
    found = {}
    for k, op in enumerate(graph.ops):
        if op_name(op.target) in SPLIT:
            factors = MATMUL_FACTORS[op_name(op.target)]
            own = tuple(j for j in factors if op.operands[j] in weights)
            if own:
                found[k] = PutOffFactors(own, tuple(j for j in factors if j not in own))
    return found


def _weight_share(graph: OpGraph, op: Op, weights: set[int]) -> float:
    """The share of dW in the backward of a product: each factor's gradient takes one product."""
    if op_name(op.target) not in SPLIT or not any(v in weights for v in op.operands):
        return 0.0
    work = op_work(graph, op)
    if not work.backward_flops:
        return 0.0
    factors = [op.operands[k] for k in MATMUL_FACTORS[op_name(op.target)]]
    made = sum(v in weights for v in factors) * work.flops
    return min(1.0, made / work.backward_flops)
