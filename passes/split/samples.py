"""The batch, followed through the op rules on a free axis: one rank per sample, moments in time.

What splits a batch without communication (microbatches, passes/split/microbatch.py; micro-chunks
of a region, passes/split/micro_chunks.py) reads here which dim of every value is the batch, if any.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from meshfold.cost_models.op_costs.compute import Work
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.limits import MOST_DEVICES
from meshfold.ir.mesh import Mesh, MeshAxis
from meshfold.ir.op_graph import Dependence, FoldedGraph, OpGraph
from meshfold.ir.spmd import PARTIAL, Layout
from meshfold.ir.strategy import OpTyping, RegionTyping
from meshfold.passes.graph.boundaries import Boundaries, find_boundaries
from meshfold.passes.graph.without_dropout import exact
from meshfold.passes.region.data_parallel import follow_batch
from meshfold.passes.region.roles import UNDONE_SHARD_S
from meshfold.passes.rules.ops.labels import Special
from meshfold.passes.rules.table import op_labels, region_rules, rule_locals

STATISTIC = "takes statistics over the batch"
_OVER_BATCH = {
    "batch_norm": STATISTIC,
    "cross_entropy": "has the samples of the batch for classes",
    "cumsum": "adds up along the batch",
    "embedding": "looks up samples of the batch",
    "embedding_bag": "looks up samples of the batch",
    "linear_cross_entropy": "has the samples of the batch for classes",
    "put_rows": "moves rows over the batch",
    "take_rows": "moves rows over the batch",
}
"""What local implementations do where the batch is sharded, and ranks have to talk."""


WHOLE_S = 1e-3 * UNDONE_SHARD_S
"""Seconds of what asks for a value of the full batch. Far less than undoing a shard: where what
comes from parameters meets the batch, the batch stays sharded."""


COMPUTE_SHARE = 1e-9
"""Of an op's seconds counts: a step of less than a million seconds is less than one value of the
full batch. Of ways that ask for as little, the one that computes least is left."""


@dataclass(frozen=True)
class _FreeAxis(CostModel):
    """Prices on an axis whose ranks are moments in time: as many as there are samples. None can
    send to another; what all of them would gather or reduce is there for inputs alone, so that as
    little is asked for as can be."""

    def __post_init__(self) -> None:
        """No devices are counted."""

    def collective_s(self, kind: str, num_bytes: float, axes: Iterable[int]) -> float:
        """More than any op on one sample takes, and more than any other way at all."""
        return UNDONE_SHARD_S if kind == "all_to_all" else WHOLE_S

    def op_s(
        self, work: Work, dtype: str, work_shards: float = 1.0, share: float = 1.0
    ) -> tuple[float, float]:
        """A share of what an op takes."""
        forward_s, backward_s = super().op_s(work, dtype, work_shards, share)
        return COMPUTE_SHARE * forward_s, COMPUTE_SHARE * backward_s


@dataclass(frozen=True)
class BatchTyping:
    """typings[r]: what the free axis does in region r."""

    boundaries: Boundaries
    typings: tuple[RegionTyping, ...]


def follow_samples(
    folded: FoldedGraph,
    cluster: ClusterSpec,
    batch_size: int,
    whole: frozenset[int] = frozenset(),
    *,
    sums: bool = False,
) -> BatchTyping:
    """Types of all regions on a free axis of one rank per sample, or for each of as many equal
    parts as a mesh may have ranks. Types say which dims are split whatever the number of
    microbatches. whole: boundary classes that are not split; sums: see follow_batch."""
    samples = next(n for n in count(-(-batch_size // MOST_DEVICES)) if batch_size % n == 0)
    mesh = Mesh((MeshAxis("microbatch", batch_size // samples),))
    folded = exact(folded)  # a plan for one precision is run in another one where it is verified
    boundaries = find_boundaries(folded)
    rules = [region_rules(region.graph, mesh.sizes) for region in folded.regions]
    costs = _FreeAxis(cluster, mesh)
    data = follow_batch(folded, boundaries, rules, costs, batch_size, whole=whole, sums=sums)
    return BatchTyping(boundaries, tuple(solution.typing for solution in data.solutions))


def over_batch(graph: OpGraph, op_index: int, chosen: OpTyping) -> str:
    """What an op with this typing on a free axis does that is no sum over samples which are each
    alone, and empty for nothing: its ranks talk, but for the number of samples that a mean is over,
    or have different rows of a table."""
    labels = op_labels(graph, graph.ops[op_index])
    if labels is None:
        return ""
    label = chosen.rules[0].partition("/")[0]
    local = rule_locals(graph, op_index, chosen)[1]
    talks = bool(labels.special.get(label, Special()).comm) and label not in labels.summed
    if not talks and (local not in _OVER_BATCH or local in _COUNTED):
        return ""
    return _OVER_BATCH.get(local, "needs all samples of the batch at once")


_COUNTED = ("cross_entropy", "linear_cross_entropy")
"""Whose other labels are rows: what is told between ranks is how many there are."""


def is_per_microbatch(layout: Layout) -> bool:
    """Whether microbatches differ in a value: each has a slice of it, or a summand."""
    return layout[0].is_shard or layout[0] == PARTIAL


def made_without_batch(graph: OpGraph, value: int) -> bool:
    """Whether a value of a region is computed from draws, constants and parameters alone."""
    needed = {value}
    for op in reversed(graph.ops):
        if not needed.isdisjoint(op.outputs):
            needed.update(op.operands)
    slots = (v for v in needed if v < len(graph.slots))
    return all(graph.values[v].depends is not Dependence.BATCH for v in slots)
