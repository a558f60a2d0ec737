"""Regions in micro-chunks, so that compute of some overlaps collectives of others.

    samples     every chunk has some samples of every rank: all ops run once per chunk
    sequence    every chunk has some rows of the sequence: what needs all rows (attention) runs
                once, its operands joined and its results split

The batch, or the sequence, is followed through the op rules on a time axis, as for microbatches
(passes/split/microbatch.py); here the chunks are ops of one graph (passes/split/chunk_graph.py).
Every collective becomes one per chunk, and a schedule
(compiler/codegen/schedule/list_scheduling.py) runs the ops of one chunk during the
collectives of another, forward and backward. Parameters are gathered once, and gradients add up
where the chunks meet.

(Samples: Wang et al., Domino: Eliminating Communication in LLM Training via Generic Tensor Slicing
and Overlapping, 2024. Products overlapped with gathers and reductions of their operands: Wang
et al., Overlap Communication with Dependent Computation via Decomposition, ASPLOS 2023.)
"""

from dataclasses import dataclass, field
from functools import cached_property

from meshfold.errors import PlanMismatchError
from meshfold.ir.op_graph import FoldedGraph, OpGraph
from meshfold.ir.plan import Plan
from meshfold.ir.strategy import Chunking, RegionTyping
from meshfold.passes.graph.typed import layouts_of_values
from meshfold.passes.rules.ops.random import RANDOM_OPS, may_draw
from meshfold.passes.rules.table import OP_RULES
from meshfold.passes.rules.typed import typed_rules
from meshfold.passes.split.chunk_graph import ChunkingError, chunked_graph
from meshfold.passes.split.rows import follow_rows
from meshfold.passes.split.samples import BatchTyping, follow_samples, is_per_microbatch, over_batch

Written = tuple[OpGraph, RegionTyping]


@dataclass(frozen=True)
class ChunkingProblem:
    """How the regions of a plan may run in micro-chunks. split: the captured graph with its
    regions as the plan has them."""

    split: FoldedGraph
    plan: Plan
    _known: dict[tuple[int, Chunking], tuple[RegionTyping, Written]] = field(default_factory=dict)

    @cached_property
    def _batch(self) -> BatchTyping:
        """What the time axis does in every region where the batch is split."""
        return follow_samples(self.split, self.plan.cluster, self.plan.model.batch_size)

    def chunked(self, region: int, typing: RegionTyping, chunking: Chunking) -> Written:
        """The graph of a region that runs in micro-chunks, and its typing.

        Raises ChunkingError where it cannot.
        """
        known = self._known.get((region, chunking))
        if known is None or known[0] != typing:
            known = typing, self._chunked(region, typing, chunking)
            self._known[region, chunking] = known
        return known[1]

    def _chunked(self, region: int, typing: RegionTyping, chunking: Chunking) -> Written:
        graph, mesh = self.split.regions[region].graph, self.plan.mesh
        if chunking.dim == "samples":
            free, count = self._batch.typings[region], self.plan.model.batch_size
        else:
            rows = follow_rows(graph, chunking.count)
            if rows is None:
                raise ChunkingError(
                    f"it has no sequence that divides into {chunking.count} micro-chunks"
                )
            free, count = rows.typing, rows.length
        _check(graph, free)
        try:
            found = chunked_graph(graph, typing, free, count, chunking.count, mesh.sizes)
            typed_rules(*found, self.split.regions[region].name, mesh)
        except PlanMismatchError as error:
            raise ChunkingError(str(error)) from error
        return found


def planned_chunks(
    problem: ChunkingProblem, region: int, typing: RegionTyping, chunking: Chunking
) -> Written:
    """The same as ChunkingProblem.chunked, for a plan. Raises PlanMismatchError."""
    try:
        return problem.chunked(region, typing, chunking)
    except ChunkingError as error:
        name = problem.split.regions[region].name
        raise PlanMismatchError(
            f"region {name} is planned in {chunking}, but {error}; plan again"
        ) from error


def _check(graph: OpGraph, free: RegionTyping) -> None:
    """Raises ChunkingError unless every op that is split needs one chunk alone."""
    if graph.mutations:
        raise ChunkingError("it updates a buffer, which every chunk would do")
    native = [layout for layout, _ in layouts_of_values(graph, free)]
    for k, (op, chosen) in enumerate(zip(graph.ops, free.ops, strict=True)):
        for v, layout in zip(op.operands, chosen.inputs, strict=True):
            if is_per_microbatch(native[v]) and layout[0].is_shard and native[v] != layout:
                raise ChunkingError(f"{op.target} needs its input split otherwise")
        if any(is_per_microbatch(x) and not x[0].is_shard for x in chosen.outputs):
            raise ChunkingError(f"{op.target} adds up over what is split")
        if not any(layout[0].is_shard for layout in chosen.outputs):
            continue
        if over_batch(graph, k, chosen):
            raise ChunkingError(f"{op.target} needs the whole batch")
        if op.target in RANDOM_OPS:
            names = OP_RULES[op.target].parameters
            if may_draw(op.target, dict(zip(names, op.args, strict=False)) | dict(op.kwargs)):
                raise ChunkingError(f"{op.target} draws random numbers")
    if not any(layout[0].is_shard for chosen in free.ops for layout in chosen.outputs):
        raise ChunkingError("nothing in it can be split")
