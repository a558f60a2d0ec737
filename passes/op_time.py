"""Time of one op on one rank under a rule per axis: its kernels, and the collectives inside it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshfold.cost_models.compute import op_work
from meshfold.cost_models.cost_model import CostModel
from meshfold.mesh import Mesh
from meshfold.opgraph import Op, OpGraph
from meshfold.passes.rules import AxisRule


@dataclass(frozen=True, slots=True)
class OpTime:
    """Seconds of one op on one rank: kernels forward and backward, and the collectives inside its
    rule by axis number, forward and backward."""

    forward_s: float
    backward_s: float
    communication_s: tuple[float, ...]
    backward_communication_s: tuple[float, ...]

    @property
    def total_s(self) -> float:
        inside_s = sum(self.communication_s) + sum(self.backward_communication_s)
        return self.forward_s + self.backward_s + inside_s


def op_time(
    graph: OpGraph, op: Op, rules: Sequence[AxisRule], mesh: Mesh, costs: CostModel
) -> OpTime:
    """Time of an op under one rule per axis: flops divided by the axes whose rule splits the work,
    memory traffic by what the rule leaves of operands and results on a rank (a weight read by every
    rank of a batch-parallel product is not divided)."""
    work = op_work(graph, op)
    split = [n if r.splits_work else 1 for r, n in zip(rules, mesh.sizes, strict=True)]
    parts = math.prod(split)
    share = _local_share(graph, op, rules, mesh)
    dtype = _dtype(graph, op)

    def inside_s(*, is_backward: bool) -> tuple[float, ...]:
        return tuple(
            sum(
                costs.collective_s(c.collective, c.num_bytes * split[axis] // parts, (axis,))
                for c in rule.comm
                if c.is_backward == is_backward
            )
            for axis, rule in enumerate(rules)
        )

    return OpTime(
        costs.compute_s(work.flops / parts, work.num_bytes * share, dtype),
        costs.compute_s(work.backward_flops / parts, work.backward_bytes * share, dtype),
        inside_s(is_backward=False),
        inside_s(is_backward=True),
    )


def _local_share(graph: OpGraph, op: Op, rules: Sequence[AxisRule], mesh: Mesh) -> float:
    """Bytes of operands and results on a rank over their bytes as whole tensors."""
    local = whole = 0.0
    for position, v in enumerate((*op.operands, *op.outputs)):
        types = ((*rule.inputs, *rule.outputs)[position] for rule in rules)
        shards = math.prod(n for t, n in zip(types, mesh.sizes, strict=True) if t.is_shard)
        whole += graph.values[v].num_bytes
        local += graph.values[v].num_bytes / shards
    return local / whole if whole else 1.0


def _dtype(graph: OpGraph, op: Op) -> str:
    """The dtype an op computes in: of its first float operand, else of its first result."""
    values = [graph.values[v] for v in (*op.operands, *op.outputs)]
    return next((v.dtype for v in values if v.is_float), values[0].dtype if values else "float32")
