"""Time of one op on one rank under a rule per axis: its kernels, and the collectives inside it.

Keys and values that go round on an axis of n ranks (rules/ops/attention.py) are sent on while
a rank computes with those before them; in backward the sums of their gradients follow, in at least
32 bits, and go one pass further. With w the seconds of the kernels of an op, b those of a visit,
and p, g, pg those of a pass of keys and values, of gradients, of both,

    b = w / n + merging or adding       forward     (n - 1) max(b, p) + b
                                        backward    (n - 1) max(b, pg) + max(b, g) + g

and what that is beyond w counts as communication.

Rows of products that come round, or go round (rules/ops/collective_matmul.py), likewise: a chunk c
is the product of the rows of one rank, with what adds them up if they go round, or puts them in
place if they come; p is its pass, d all gradients of weights, and

    x | y = max(x, y) + (k - 1) min(x, y)       overlapped, slower by k

    all_gather_matmul      forward   (n - 1) (c | p) + c
                           backward  c + (n - 2) (c | p) + ((c + d) | p)
    matmul_reduce_scatter  forward   c + (n - 1) (c | p)
                           backward  (n - 1) (c | p) + c + d
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from meshfold.cost_models.op_costs.compute import Work, op_work, stated_work
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.cost_models.simulation.streams import overlapped_s
from meshfold.ir.custom_ops import CustomCosts
from meshfold.ir.op_graph import ITEM_BYTES, Op, OpGraph
from meshfold.ir.spmd import local_shape
from meshfold.passes.rules.ops.collective_matmul import ALL_GATHER_MATMUL, COLLECTIVE_MATMUL_RULES
from meshfold.passes.rules.ops.experts import DISPATCH_OPS
from meshfold.passes.rules.ops.labels import SHIFT
from meshfold.passes.rules.table import AxisRule, RuleComm

_QUERY, _KEY, _VALUE, _RESULT = 0, 1, 2, -1
"""Tensors of attention."""


@dataclass(frozen=True, slots=True)
class OpTime:
    """Seconds of one op on one rank."""

    forward_s: float
    """Kernels, as backward_s."""
    backward_s: float
    communication_s: tuple[float, ...]
    """Collectives inside its rule, by axis number, forward."""
    backward_communication_s: tuple[float, ...]
    recomputed_communication_s: tuple[float, ...]
    """Forward ones that a second run repeats."""

    @property
    def total_s(self) -> float:
        inside_s = sum(self.communication_s) + sum(self.backward_communication_s)
        return self.forward_s + self.backward_s + inside_s


@dataclass(frozen=True, slots=True)
class InsideCollective:
    """A collective inside an op's rule on axis number `axis`, in one direction; all passes of keys
    and values that go round as one: num_bytes of one pass, seconds beyond the kernels. Flags as of
    RuleComm."""

    kind: str
    axis: int
    num_bytes: int
    seconds: float
    is_backward: bool
    is_asynchronous: bool
    is_saved: bool


class OpTimer:
    """Times of one op under any rules. What rules have in common is priced once."""

    def __init__(self, graph: OpGraph, op: Op, costs: CostModel, work: Work | None = None) -> None:
        self.mesh = costs.mesh
        self.costs = costs
        self.work = work or op_work(graph, op)
        stated = op.custom.costs if op.custom else CustomCosts()
        self._stated = (graph, op, stated) if stated.states_work else None
        """Of an op whose rule states its work."""
        self._only_dispatches = op.target in DISPATCH_OPS
        self._target = op.target
        self._moving = 0 if op.target == ALL_GATHER_MATMUL else _RESULT
        """What comes round, or goes round: x, or the result."""
        self.dtype = compute_dtype(graph, op)
        tensors = [graph.values[v] for v in (*op.operands, *op.outputs)]
        self._tensor_bytes = [value.num_bytes for value in tensors]
        self._shapes = [value.shape for value in tensors]
        self._loads: dict[tuple[int, str], float] = {}
        self._nothing = (0.0,) * len(costs.mesh.axes)
        self._num_shards: dict[tuple[int, str], tuple[float, ...]] = {}
        self._kernels: dict[tuple[float, tuple[float, ...]], tuple[float, float]] = {}

    def time(self, rules: Sequence[AxisRule]) -> OpTime:
        """Time under one rule per axis: flops as the busiest rank has them, divided by the axes
        whose rule splits the work; memory traffic by what the rule leaves of operands and results
        on a rank (a weight read by every rank of a batch-parallel product is not divided)."""
        kernels = self._kernels_of(rules)
        if not any(rule.comm for rule in rules):
            # Rows that are not dispatched are not put in another order.
            forward_s, backward_s = (0.0, 0.0) if self._only_dispatches else kernels
            return OpTime(forward_s, backward_s, *(self._nothing,) * 3)
        inside = self.inside(rules)
        there = [c for c in inside if not c.is_backward]
        back = [c for c in inside if c.is_backward]
        recomputed = [c for c in there if not c.is_saved]
        by_axis = (
            tuple(sum(c.seconds for c in of if c.axis == axis) for axis in range(len(rules)))
            for of in (there, back, recomputed)
        )
        return OpTime(*kernels, *by_axis)

    def _kernels_of(self, rules: Sequence[AxisRule]) -> tuple[float, float]:
        """Kernels forward and backward under one rule per axis."""
        if self._stated is None:
            return self._kernels_s(self._work_shards(rules), self._shards(rules))
        graph, op, costs = self._stated
        shapes = [
            local_shape(shape, tuple(rule.inputs[k] for rule in rules), self.mesh.sizes)
            for k, shape in enumerate(self._shapes[: len(op.operands)])
        ]
        work = stated_work(costs, shapes, graph, op, self._share(self._shards(rules)))
        return self.costs.op_s(work, self.dtype)

    def _share(self, shards: tuple[float, ...]) -> float:
        """Of the bytes of all tensors, what is local."""
        total = sum(self._tensor_bytes)
        local = sum(size / n for size, n in zip(self._tensor_bytes, shards, strict=True))
        return local / total if total else 1.0

    def _work_shards(self, rules: Sequence[AxisRule]) -> float:
        """How many times the work of the busiest rank makes the op's."""
        split = (n for r, n in zip(rules, self.mesh.sizes, strict=True) if r.splits_work)
        return math.prod(split) / math.prod(self._load(k, r) for k, r in enumerate(rules))

    def _load(self, axis: int, rule: AxisRule) -> float:
        """Work of the busiest rank over the mean, where a dim is padded, too."""
        key = axis, rule.name
        if key not in self._loads:
            filled = 1.0
            for shape, t in zip(self._shapes, (*rule.inputs, *rule.outputs), strict=True):
                if t.padded:
                    size = self.mesh.sizes[axis]
                    padded = local_shape(shape, (t,), (size,))[t.dim] * size
                    filled = max(filled, padded / shape[t.dim])
            self._loads[key] = rule.load * filled
        return self._loads[key]

    def _shards(self, rules: Sequence[AxisRule]) -> tuple[float, ...]:
        """Number of shards of every operand and result under the rules; rows that are with their
        experts, and padded dims, into fewer, as the busiest rank has them."""
        total: tuple[float, ...] = (1,) * len(self._tensor_bytes)
        for axis, rule in enumerate(rules):
            key = axis, rule.name
            if key not in self._num_shards:
                n, load = self.mesh.sizes[axis], self._load(axis, rule)
                types = (*rule.inputs, *rule.outputs)
                self._num_shards[key] = tuple(
                    n / load if t.kind == "E" or t.padded else n if t.is_shard else 1 for t in types
                )
            total = tuple(map(operator.mul, total, self._num_shards[key]))
        return total

    def _kernels_s(self, work_shards: float, shards: tuple[float, ...]) -> tuple[float, float]:
        """Kernels forward and backward, the work split in `work_shards`, every tensor in shards."""
        key = work_shards, shards
        if key not in self._kernels:
            share = self._share(shards)
            self._kernels[key] = self.costs.op_s(self.work, self.dtype, work_shards, share)
        return self._kernels[key]

    def inside(self, rules: Sequence[AxisRule]) -> tuple[InsideCollective, ...]:
        """The collectives inside the rules, axis by axis, in order of execution."""
        split = [n if r.splits_work else 1 for r, n in zip(rules, self.mesh.sizes, strict=True)]
        return tuple(
            self._inside(comm, axis, split, rules)
            for axis, rule in enumerate(rules)
            for comm in rule.comm
        )

    def _inside(
        self, comm: RuleComm, axis: int, split: Sequence[int], rules: Sequence[AxisRule]
    ) -> InsideCollective:
        kind = comm.collective
        if self._target in COLLECTIVE_MATMUL_RULES:
            num_bytes = int(comm.num_bytes / self._shards(rules)[self._moving])
            seconds = self._products_s(num_bytes, axis, rules, comm.is_backward)
        elif kind == SHIFT:
            num_bytes = int(comm.num_bytes / self._shards(rules)[_KEY])
            seconds = self._around_s(num_bytes, axis, rules, comm.is_backward)
        else:
            own = 1 if comm.is_undivided else split[axis]
            num_bytes = comm.num_bytes * own // math.prod(split)
            seconds = self.costs.collective_s(kind, num_bytes, (axis,))
        return InsideCollective(
            kind, axis, num_bytes, seconds, comm.is_backward, comm.is_asynchronous, comm.is_saved
        )

    def _around_s(
        self,
        num_bytes: int,
        axis: int,
        rules: Sequence[AxisRule],
        is_backward: bool,
    ) -> float:
        """What keys and values that go round take beyond the kernels, see the module docstring.
        num_bytes: those of one rank."""
        shards, n = self._shards(rules), self.mesh.sizes[axis]
        kernels_s = self._kernels_s(self._work_shards(rules), shards)[is_backward]
        wide = max(1.0, 4 / ITEM_BYTES[self.dtype])
        # Sums over visits are read, added to, written.
        sums = (_QUERY, _KEY, _VALUE) if is_backward else (_RESULT,)
        summed = 3 * wide * sum(self._tensor_bytes[k] / shards[k] for k in sums)
        visit_s = kernels_s / n + self.costs.compute_s(0, summed, self.dtype)
        gradient_bytes = wide * num_bytes if is_backward else 0
        pass_s, gradient_s = (
            self.costs.collective_s(SHIFT, size, (axis,))
            for size in (num_bytes + gradient_bytes, gradient_bytes)
        )
        return (n - 1) * max(visit_s, pass_s) + max(visit_s, gradient_s) + gradient_s - kernels_s

    def _products_s(
        self, num_bytes: int, axis: int, rules: Sequence[AxisRule], is_backward: bool
    ) -> float:
        """What rows that come round, or go round, take beyond the kernels of products, see the
        module docstring. num_bytes: of one rank's rows."""
        shards, n = self._shards(rules), self.mesh.sizes[axis]
        kernels_s = self._kernels_s(self._work_shards(rules), shards)[is_backward]
        weights_s = kernels_s / 2 if is_backward else 0.0
        comes_round = (self._target == ALL_GATHER_MATMUL) != is_backward
        # Rows that come are put in their place, summands read, and sums read and written.
        moved = (2 if comes_round else 3) * num_bytes
        chunk_s = (kernels_s - weights_s) / n + self.costs.compute_s(0, moved, self.dtype)
        pass_s = self.costs.collective_s(SHIFT, num_bytes, (axis,))
        slowdown = self.costs.cluster.overlap_slowdown
        if comes_round or not is_backward:
            total_s = chunk_s + (n - 1) * overlapped_s(chunk_s, pass_s, slowdown) + weights_s
        else:
            total_s = chunk_s + (n - 2) * overlapped_s(chunk_s, pass_s, slowdown)
            total_s += overlapped_s(chunk_s + weights_s, pass_s, slowdown)
        return total_s - kernels_s


class OpWorks:
    """Work of the ops of graphs: the same on all meshes."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[OpGraph, tuple[Work, ...]]] = {}
        """Work by the id of a graph, which has to stay alive."""

    def of(self, graph: OpGraph) -> tuple[Work, ...]:
        """The work of each op."""
        if id(graph) not in self._known:
            self._known[id(graph)] = graph, tuple([op_work(graph, op) for op in graph.ops])
        return self._known[id(graph)][1]


class OpTimers:
    """Timers of the ops of graphs on one mesh. works: if at hand from other meshes."""

    def __init__(self, costs: CostModel, works: OpWorks | None = None) -> None:
        self.costs = costs
        self._works = works or OpWorks()
        self._known: dict[int, tuple[OpGraph, tuple[OpTimer, ...]]] = {}

    def of(self, graph: OpGraph) -> tuple[OpTimer, ...]:
        """The timer of each op."""
        if id(graph) not in self._known:
            pairs = zip(graph.ops, self._works.of(graph), strict=True)
            timers = [OpTimer(graph, op, self.costs, work) for op, work in pairs]
            self._known[id(graph)] = graph, tuple(timers)
        return self._known[id(graph)][1]


def op_time(graph: OpGraph, op: Op, rules: Sequence[AxisRule], costs: CostModel) -> OpTime:
    """Time of an op under one rule per axis."""
    return OpTimer(graph, op, costs).time(rules)


def compute_dtype(graph: OpGraph, op: Op) -> str:
    """The dtype an op computes in: of its first float operand, else of its first result."""
    values = [graph.values[v] for v in (*op.operands, *op.outputs)]
    return next((v.dtype for v in values if v.is_float), values[0].dtype if values else "float32")
