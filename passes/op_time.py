"""Time of one op on one rank under a rule per axis: its kernels, and the collectives inside it."""

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshfold.cost_models.compute import op_work
from meshfold.cost_models.cost_model import CostModel
from meshfold.mesh import Mesh
from meshfold.opgraph import Op, OpGraph
from meshfold.passes.rules import AxisRule
from meshfold.passes.rules_experts import TRAVELS
from meshfold.spmd import local_shape


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


@dataclass(frozen=True, slots=True)
class InsideCollective:
    """A collective inside an op's rule on axis number `axis`, in one direction."""

    kind: str
    axis: int
    num_bytes: int
    seconds: float
    is_backward: bool


class OpTimer:
    """Times of one op under any rules. What rules have in common is priced once."""

    def __init__(self, graph: OpGraph, op: Op, mesh: Mesh, costs: CostModel) -> None:
        self.mesh = mesh
        self.costs = costs
        self.work = op_work(graph, op)
        self._only_moves = op.target in TRAVELS
        self.dtype = compute_dtype(graph, op)
        tensors = [graph.values[v] for v in (*op.operands, *op.outputs)]
        self._tensor_bytes = [value.num_bytes for value in tensors]
        self._shapes = [value.shape for value in tensors]
        self._loads: dict[tuple[int, str], float] = {}
        self._cuts: dict[tuple[int, str], tuple[float, ...]] = {}
        self._kernels: dict[tuple[float, tuple[float, ...]], tuple[float, float]] = {}

    def time(self, rules: Sequence[AxisRule]) -> OpTime:
        """Time under one rule per axis: flops as the busiest rank has them, divided by the axes
        whose rule splits the work; memory traffic by what the rule leaves of operands and results
        on a rank (a weight read by every rank of a batch-parallel product is not divided)."""
        split = [n if r.splits_work else 1 for r, n in zip(rules, self.mesh.sizes, strict=True)]
        parts = math.prod(split) / math.prod(self._load(k, r) for k, r in enumerate(rules))
        forward_s, backward_s = self._kernels_s(parts, self._shards(rules))
        if self._only_moves and not any(rule.comm for rule in rules):
            # Rows that stay are not put in another order.
            forward_s = backward_s = 0.0
        return OpTime(
            forward_s,
            backward_s,
            self._inside_s(rules, split, is_backward=False),
            self._inside_s(rules, split, is_backward=True),
        )

    def _load(self, axis: int, rule: AxisRule) -> float:
        """Work of the busiest rank over the mean, where a dim is padded, too."""
        key = axis, rule.name
        if key not in self._loads:
            filled = 1.0
            for shape, t in zip(self._shapes, (*rule.inputs, *rule.outputs), strict=True):
                if t.padded:
                    size = self.mesh.sizes[axis]
                    whole = local_shape(shape, (t,), (size,))[t.dim] * size
                    filled = max(filled, whole / shape[t.dim])
            self._loads[key] = rule.load * filled
        return self._loads[key]

    def _shards(self, rules: Sequence[AxisRule]) -> tuple[float, ...]:
        """Into how many shards the rules cut every operand and result; rows that are with their
        experts, and padded dims, into fewer, as the busiest rank has them."""
        total: tuple[float, ...] = (1,) * len(self._tensor_bytes)
        for axis, rule in enumerate(rules):
            key = axis, rule.name
            if key not in self._cuts:
                n, load = self.mesh.sizes[axis], self._load(axis, rule)
                types = (*rule.inputs, *rule.outputs)
                self._cuts[key] = tuple(
                    n / load if t.kind == "E" or t.padded else n if t.is_shard else 1 for t in types
                )
            total = tuple(map(operator.mul, total, self._cuts[key]))
        return total

    def _kernels_s(self, parts: float, shards: tuple[float, ...]) -> tuple[float, float]:
        """Kernels forward and backward, the work in `parts` and every tensor in its shards."""
        key = parts, shards
        if key not in self._kernels:
            whole = sum(self._tensor_bytes)
            local = sum(size / n for size, n in zip(self._tensor_bytes, shards, strict=True))
            share = local / whole if whole else 1.0
            work, compute_s = self.work, self.costs.compute_s
            self._kernels[key] = (
                compute_s(work.flops / parts, work.num_bytes * share, self.dtype),
                compute_s(work.backward_flops / parts, work.backward_bytes * share, self.dtype),
            )
        return self._kernels[key]

    def inside(self, rules: Sequence[AxisRule]) -> tuple[InsideCollective, ...]:
        """The collectives inside the rules, axis by axis, in order of execution."""
        split = [n if r.splits_work else 1 for r, n in zip(rules, self.mesh.sizes, strict=True)]
        return tuple(c for axis, rule in enumerate(rules) for c in self._inside(rule, axis, split))

    def _inside(
        self, rule: AxisRule, axis: int, split: Sequence[int]
    ) -> Iterator[InsideCollective]:
        parts = math.prod(split)
        for comm in rule.comm:
            num_bytes = comm.num_bytes * split[axis] // parts
            seconds = self.costs.collective_s(comm.collective, num_bytes, (axis,))
            yield InsideCollective(comm.collective, axis, num_bytes, seconds, comm.is_backward)

    def _inside_s(
        self, rules: Sequence[AxisRule], split: Sequence[int], *, is_backward: bool
    ) -> tuple[float, ...]:
        """Collectives inside the rules, by axis."""
        return tuple(
            sum(c.seconds for c in self._inside(rule, axis, split) if c.is_backward == is_backward)
            if rule.comm
            else 0.0
            for axis, rule in enumerate(rules)
        )


def op_time(
    graph: OpGraph, op: Op, rules: Sequence[AxisRule], mesh: Mesh, costs: CostModel
) -> OpTime:
    """Time of an op under one rule per axis."""
    return OpTimer(graph, op, mesh, costs).time(rules)


def compute_dtype(graph: OpGraph, op: Op) -> str:
    """The dtype an op computes in: of its first float operand, else of its first result."""
    values = [graph.values[v] for v in (*op.operands, *op.outputs)]
    return next((v.dtype for v in values if v.is_float), values[0].dtype if values else "float32")
