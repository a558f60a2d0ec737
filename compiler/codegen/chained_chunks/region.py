"""The schedule of a chunked region, whose chunks may come from the region before."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from meshfold.codegen.chained_chunks.segment_fusion import (
    IntervalAction,
    actions_of,
    fusable_runs,
    interval_of,
    renumbered,
)
from meshfold.codegen.program.emitted import RegionProgram
from meshfold.codegen.program.region_schedule import (
    ActionKind,
    RegionAction,
    RegionSchedule,
    SegmentedGraph,
)
from meshfold.codegen.schedule.direction_tasks import DirectionTasks, backward_tasks, forward_tasks
from meshfold.codegen.schedule.list_scheduling import listed, region_schedule
from meshfold.codegen.schedule.segment_costs import SegmentCosts
from meshfold.codegen.schedule.segmented_region import SegmentedRegion, segmented
from meshfold.codegen.schedule.segments import SegmentLimits, fused_graph, segmented_graph
from meshfold.passes.chained_chunks import (
    NEXT,
    ChainBoundary,
    ChainedOrders,
    chained_order,
    joined_outputs,
    split_slots,
)
from meshfold.passes.schedule.list_schedule import Task

GRAIN = 1 / 12
"""Share of the longest collective that a segment of a chained region takes at least. Fitted to
Llama-3-8B with tp8+sp: with a half a layer's forward takes 2.60 ms, with this 2.37, and no less
with shorter ones."""


def chunked_schedule(
    region: RegionProgram,
    costs: SegmentCosts,
    bound_bytes: int,
    chained: Mapping[int, int],
    known: ChainedOrders,
) -> RegionSchedule:
    """The schedule of a chunked region. bound_bytes: what may be saved for deferred gradients;
    chained: slots that come in chunks from an equal region before, and which of its outputs each
    is. A chained region has the segments with which the chain is faster; others are listed."""
    split = split_slots(region.ops, region.typing)
    joined = joined_outputs(region.ops, region.typing)
    seconds = tuple(time.forward_s for time in costs.op_times)
    taken_apart, put_together = (tuple(v.ops for v in of.values()) for of in (split, joined))
    limits = SegmentLimits(taken_apart, put_together, seconds)

    def segments_of(graph: SegmentedGraph) -> "_BoundarySegments":
        return _BoundarySegments(
            {v: _segment_of(graph, value.ops) for v, value in split.items()},
            {n: _segment_of(graph, value.ops) for n, value in joined.items()},
        )

    graph = segmented_graph(region.graph.graph, limits)
    full = _Chain(segmented(region, costs, graph), limits, segments_of(graph), chained)
    if not chained:
        schedule = region_schedule(full.of, listed(full.of, bound_bytes))
        return replace(schedule, splits=full.at.splits, joins=full.at.joins)
    limits = replace(limits, shortest_s=GRAIN * _longest_s(region, costs))
    graph = segmented_graph(region.graph.graph, limits)
    short = _Chain(segmented(region, costs, graph), limits, segments_of(graph), chained)
    found = [chain.scheduled(bound_bytes, known) for chain in (full, short)]
    return min(found, key=lambda pair: pair[1])[0]


def _longest_s(region: RegionProgram, costs: SegmentCosts) -> float:
    """Seconds of the longest collective of the forward."""
    segments = segmented_graph(region.graph.graph).segments
    transfers = [costs.conversion(s, 0)[1] for s in segments if s.kind == "start"]
    return max((t.seconds for t in transfers if t is not None), default=math.inf)


def _segment_of(graph: SegmentedGraph, ops: frozenset[int]) -> int:
    segments = enumerate(graph.segments)
    return next(k for k, s in segments if s.kind == "ops" and not ops.isdisjoint(s.origins))


@dataclass(frozen=True)
class _BoundarySegments:
    """The splits and joins of a RegionSchedule."""

    splits: Mapping[int, int]
    joins: Mapping[int, int]

    def renumbered(self, numbers: tuple[int, ...]) -> "_BoundarySegments":
        return _BoundarySegments(
            {v: numbers[k] for v, k in self.splits.items()},
            {n: numbers[k] for n, k in self.joins.items()},
        )


@dataclass(frozen=True)
class _Chain:
    """A region that follows its like."""

    of: SegmentedRegion
    limits: SegmentLimits
    at: _BoundarySegments
    chained: Mapping[int, int]

    def scheduled(self, bound_bytes: int, known: ChainedOrders) -> tuple[RegionSchedule, float]:
        """The schedule, and the seconds of both directions, as ChainedOrder has them."""
        forward, backward = forward_tasks(self.of), backward_tasks(self.of)
        intervals, total_s = [], 0.0
        for tasks, boundary in (
            (forward, self._forward_boundary(forward)),
            (backward, self._backward_boundary(backward)),
        ):
            order = chained_order(self._without_idle(tasks), boundary, bound_bytes, known)
            next_one = RegionAction(ActionKind.EPILOGUE)
            actions = [next_one if t == NEXT else tasks.actions[t] for t in order.order]
            intervals.append(interval_of(actions, order.num_epilogue))
            total_s += order.seconds
        return self._fused(*intervals), total_s

    def _without_idle(self, tasks: DirectionTasks) -> list[Task]:
        """What splits or joins chunks does not run between chained regions."""
        found = list(tasks.tasks)
        splits = [self.at.splits[v] for v in self.chained]
        for k in (*splits, *(self.at.joins[n] for n in self.chained.values())):
            t = tasks.of_segment[k]
            found[t] = replace(found[t], seconds=0.0)
        return found

    def _fused(
        self, forward: list[IntervalAction], backward: list[IntervalAction]
    ) -> RegionSchedule:
        """Segments that stay together are one."""
        alone = {*self.at.splits.values(), *self.at.joins.values()}
        runs = fusable_runs(self.of.graph, forward, backward, alone)
        graph, numbers = fused_graph(self.of.region.graph.graph, self.limits, runs)
        of = segmented(self.of.region, self.of.costs, graph)
        there, forward_epilogue = actions_of(renumbered(forward, numbers))
        back, backward_epilogue = actions_of(renumbered(backward, numbers))
        at = self.at.renumbered(numbers)
        return replace(
            region_schedule(of, (there, back)),
            splits=at.splits,
            joins=at.joins,
            chained=self.chained,
            forward_epilogue=forward_epilogue,
            backward_epilogue=backward_epilogue,
        )

    def _chunk_names(self) -> Iterator[tuple[str, str]]:
        """The name of every chunk in the region that sends it, and in the next one."""
        segments = self.of.graph.segments
        for v, n in self.chained.items():
            join, split = segments[self.at.joins[n]], segments[self.at.splits[v]]
            yield from zip(join.inputs[1:], split.outputs, strict=True)

    def _forward_boundary(self, tasks: DirectionTasks) -> ChainBoundary:
        """Other results than chunks must be there when the region ends."""
        at, makers = tasks.of_segment, self.of.graph.makers
        results = enumerate(self.of.graph.results)
        names = [name for n, name in results if n not in self.chained.values()]
        early = {at[makers[name]] for name in names if name in makers}
        sent = [
            (at[makers[theirs]], at[k])
            for theirs, own in self._chunk_names()
            for k, segment in enumerate(self.of.graph.segments)
            if own in segment.inputs
        ]
        return _boundary(tasks, sent, early)

    def _backward_boundary(self, tasks: DirectionTasks) -> ChainBoundary:
        """Other gradients than those of chunks leave with the region's own: what computes them must
        have run when it ends."""
        at, last = tasks.of_segment, tasks.last_of_segment
        early = {t for k in self._direct_readers() for t in (at[k], last[k])}
        sent = [
            (t, at[self.of.graph.makers[theirs]])
            for theirs, own in self._chunk_names()
            for k, segment in enumerate(self.of.graph.segments)
            if own in segment.inputs
            for t in dict.fromkeys((at[k], last[k]))
        ]
        return _boundary(tasks, sent, early)

    def _direct_readers(self) -> set[int]:
        """Segments that read what is passed directly, has a gradient and does not come in
        chunks."""
        region, values = self.of.region, self.of.costs.ops.values
        names = zip(region.direct, region.direct_names, strict=True)
        trained = {n for v, n in names if v not in self.chained and values[v].requires_grad}
        segments = enumerate(self.of.graph.segments)
        return {k for k, segment in segments if not trained.isdisjoint(segment.inputs)}


def _boundary(tasks: DirectionTasks, sent: list[tuple[int, int]], early: set[int]) -> ChainBoundary:
    return ChainBoundary(tuple(sent), tasks.first | early, tasks.prefetch, tasks.awaits)
