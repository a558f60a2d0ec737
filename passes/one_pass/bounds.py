"""A lower bound on every program of one mesh, before any of its regions is typed.

Per instance, with the work and the tensors of its ops sharded over all ranks, and its parameters
either unsharded on dp, their gradients all-reduced, or sharded, gathered for use, once or twice,
also in backward, and their gradients reduce-scattered:

    forward_s + max(backward_s, all_reduce_s)
    forward_s + max(backward_s, reduce_scatter_s)
    forward_s + max(backward_s, gather_s + reduce_scatter_s)

which are terms of instance_s (passes/price/step.py). Only as many parameters can be unsharded as
memory has room for with their gradients and states, or stay gathered as without; those are taken
where that saves most a byte. A sum of maxima is no less than the maximum of sums, and time is
concave in bytes, so that subsets of a region take no less than their share of it.

Under HSDP parameters are gathered and gradients scattered over a part of dp; what is then summed
over the replicas is left out.

Typing a mesh takes a search per region; this takes microseconds. It prunes meshes on which dp is
what it is elsewhere while fewer ranks shard the weights, as context parallelism with tensor
parallelism.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshfold.cost_models.op_costs.compute import op_work
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.mesh import REPLICATE_AXIS, SHARD_AXIS
from meshfold.ir.op_graph import FoldedGraph, OpGraph, SlotKind, SourceKind
from meshfold.ir.spmd import REPLICATE
from meshfold.ir.strategy import RegionTyping
from meshfold.passes.graph.boundaries import num_instances
from meshfold.passes.graph.typed import layouts_of_values
from meshfold.passes.price.op_time import compute_dtype
from meshfold.passes.price.parameters import stored_bytes
from meshfold.passes.region.data_parallel import DataParallel
from meshfold.passes.rules.ops.experts import DISPATCH_OPS


@dataclass(frozen=True, slots=True)
class _Reduction:
    """One instance: local bytes of the parameters that need a reduction on dp, stored and gathered,
    and seconds of their collectives in backward."""

    stored_bytes: int
    gathered_bytes: int
    unsharded_s: float
    gather_s: float
    scatter_s: float

    @property
    def sharded_s(self) -> float:
        return self.gather_s + self.scatter_s

    def saved_s(self, room: "Room") -> float:
        """What memory can save at most, were it all spent on parameters like these."""
        saved_s = 0.0
        if self.stored_bytes:
            rate = max(0.0, self.sharded_s - self.unsharded_s) / self.stored_bytes
            saved_s = room.unsharded_bytes * rate if rate else 0.0
        if self.gathered_bytes and self.gather_s:
            saved_s = max(saved_s, room.gathered_bytes * self.gather_s / self.gathered_bytes)
        return saved_s


@dataclass(frozen=True, slots=True)
class Room:
    """Local parameters that a rank can hold at most, in bytes: unsharded on dp; or sharded and
    gathered from forward to backward."""

    unsharded_bytes: float
    gathered_bytes: float


LeastCompute = Mapping[int, tuple[float, float]]
"""least_compute_s of each region: the same on all meshes of as many ranks."""


def least_compute(folded: FoldedGraph, costs: CostModel) -> LeastCompute:
    """least_compute_s of every region that has instances."""
    return {r: least_compute_s(folded.regions[r].graph, costs) for r in num_instances(folded)}


def least_step_s(
    folded: FoldedGraph,
    data: DataParallel,
    costs: CostModel,
    room: Room,
    compute: LeastCompute | None = None,
) -> float:
    """Seconds that no program on the mesh of `costs` is below.

    data: what regions do on its dp axis, axis 0. room: what fits in memory. compute: of `folded`
    and as many ranks, if at hand.
    """
    compute = compute or least_compute(folded, costs)
    forward_s = backward_s = least_s = sharded_s = saved_s = 0.0
    for region, count in num_instances(folded).items():
        graph = folded.regions[region].graph
        forward, backward = compute[region]
        reduction = _reduction(graph, data.solutions[region].typing, costs)
        forward_s += count * forward
        backward_s += count * backward
        least_s += count * min(reduction.unsharded_s, reduction.scatter_s)
        sharded_s += count * reduction.sharded_s
        saved_s = max(saved_s, reduction.saved_s(room))
    # A parameter of several instances is resident once and saves as often as it is read.
    reduced_s = max(least_s, sharded_s - _most_readers(folded) * saved_s if saved_s else sharded_s)
    return forward_s + max(backward_s, reduced_s)


def _most_readers(folded: FoldedGraph) -> int:
    """Instances that read one parameter, at most."""
    sources = (s for i in folded.instances for s in set(i.sources))
    readers = Counter(s.label for s in sources if s.kind is SourceKind.PARAMETER)
    return max(readers.values(), default=1)


def least_compute_s(graph: OpGraph, costs: CostModel) -> tuple[float, float]:
    """Forward and backward of one instance, no typing takes less: the work of every op and all its
    tensors sharded over all ranks. What puts rows in another order may have nothing to do."""
    num_shards = costs.mesh.num_ranks
    forward_s = backward_s = 0.0
    for op in graph.ops:
        if op.target in DISPATCH_OPS:
            continue  # rows that stay are not put in another order
        work, dtype = op_work(graph, op), compute_dtype(graph, op)
        there_s, back_s = costs.op_s(work, dtype, num_shards, 1 / num_shards)
        forward_s += there_s
        backward_s += back_s
    return forward_s, backward_s


def _reduction(graph: OpGraph, typing: RegionTyping, costs: CostModel) -> _Reduction:
    """What the backward waits for: parameters that the ops read unsharded on dp, sharded over tp,
    or whole where tp shards the batch, and over ep, where only those of experts are."""
    mesh = costs.mesh
    demands = layouts_of_values(graph, typing)
    read = [
        graph.values[i]
        for i, slot in enumerate(graph.slots)
        if slot.kind is SlotKind.PARAMETER and graph.values[i].requires_grad
        if any(layout[0] == REPLICATE for layout in demands[i][1])
    ]
    sharding = (n for name, n in zip(mesh.names, mesh.sizes, strict=True) if name in ("ep", "tp"))
    num_shards = math.prod(sharding)
    gathered = sum(v.num_bytes for v in read) // num_shards
    stored = sum(stored_bytes(v, (), ()) for v in read) // num_shards
    batch_axes = [k for k, name in enumerate(mesh.names) if name != "tp"]

    # (costs, axes, shards of tp that they move): where tp shards the batch, whole parameters.
    groups: list[tuple[CostModel, Sequence[int], int]] = [(costs, (0,), 1), (costs, batch_axes, 1)]
    groups.append((costs, range(len(mesh.axes)), num_shards))
    if mesh.replicas > 1:
        names = list(enumerate(costs.storage.mesh.names))
        groups.append((costs.storage, [k for k, name in names if name == SHARD_AXIS], 1))
        within = [k for k, name in names if name != REPLICATE_AXIS]
        groups.append((costs.storage, within, num_shards))
        groups.append((costs.storage, [k for k in within if names[k][1] != "tp"], 1))

    def least_s(kind: str, num_bytes: int) -> float:
        return min(of.collective_s(kind, n * num_bytes, axes) for of, axes, n in groups)

    gather_s, scatter_s = least_s("all_gather", gathered), least_s("reduce_scatter", stored)
    return _Reduction(stored, gathered, least_s("all_reduce", stored), gather_s, scatter_s)
