"""The tasks of one direction of a region, in an order in which they can run
(meshfold.passes.schedule.list_schedule)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshfold.codegen.program.region_schedule import ActionKind, CollectiveSegment, RegionAction
from meshfold.codegen.schedule.segmented_region import SegmentedRegion
from meshfold.passes.schedule.list_schedule import Task
from meshfold.zero.parameter_group import ParameterGroup


@dataclass(frozen=True)
class DirectionTasks:
    """Tasks of the forward or the backward of a region, and the action that each is."""

    tasks: Sequence[Task]
    actions: Sequence[RegionAction]
    of_segment: Mapping[int, int]
    """The task that runs a segment, by number of the segment."""
    last_of_segment: Mapping[int, int]
    """The task after which all of a segment has run: its deferred gradients, where it has any."""
    first: frozenset[int]
    """Tasks that unshard the region's own parameters."""
    prefetch: int = -1
    """The task that starts the gathers of the region that comes next, -1 for none."""
    awaits: int = -1
    """The task of the next region that waits for these gathers."""


class _Writer:
    """Collects the tasks of direction 0, the forward, or 1."""

    def __init__(self, of: SegmentedRegion, direction: int) -> None:
        self.of = of
        self.direction = direction
        self.tasks: list[Task] = []
        self.actions: list[RegionAction] = []
        self.at: dict[int, int] = {}

    def add(self, kind: ActionKind, task: Task, number: int = -1) -> int:
        """The number of the new task."""
        self.actions.append(RegionAction(kind, number))
        self.tasks.append(task)
        return len(self.tasks) - 1

    def add_segment(self, k: int, needs: set[int]) -> None:
        kind = ActionKind.BACKWARD if self.direction else ActionKind.FORWARD
        self.at[k] = self.add(kind, self._task(k, tuple(sorted(needs))), k)

    def add_prefetch(self, needs: int) -> int:
        """The gathers of the region that comes next, which are taken to be as long as its own."""
        groups, costs = [g for g in self.of.region.groups if g.gather], self.of.costs
        if not groups:
            return self.add(ActionKind.PREFETCH, Task((needs,)))
        seconds = sum(costs.group_s("all_gather", group, group.gather) for group in groups)
        axes = max((group.gather for group in groups), key=len)
        link = costs.costs.storage.group_link(axes).name
        task = Task((needs,), 0.0, link, seconds, floats=True, is_due=True)
        return self.add(ActionKind.PREFETCH, task)

    def _task(self, k: int, needs: tuple[int, ...]) -> Task:
        segment, costs = self.of.graph.segments[k], self.of.costs
        if segment.kind == "ops":
            return Task(needs, costs.seconds(self.of.graph, segment, self.direction))
        seconds, transfer, _ = costs.conversion(segment, self.direction)
        starts = (segment.kind == "start") == (self.direction == 0)
        if transfer is None:
            return Task(needs, seconds if starts else 0.0)
        if starts:
            return Task(needs, seconds, transfer.link, transfer.seconds)
        other = self._wait_of(segment) if self.direction else segment.partner
        return Task(needs, seconds, start=self.at[other])

    def _wait_of(self, start: CollectiveSegment) -> int:
        waits = enumerate(self.of.graph.segments)
        return next(k for k, w in waits if w.kind == "wait" and w.inputs == start.outputs)


def forward_tasks(of: SegmentedRegion) -> DirectionTasks:
    """What runs in the forward; parameter groups are unsharded before their first readers."""
    found, groups = _Writer(of, 0), of.region.groups
    unsharded: dict[int, int] = {}
    for k, segment in enumerate(of.graph.segments):
        read = of.groups_of(segment)
        for b in read:
            if b not in unsharded:
                copies = of.costs.copies(groups[b])
                task = Task(seconds=copies.packed_s + copies.unpacked_s)
                unsharded[b] = found.add(ActionKind.UNSHARD, task, b)
        makers = of.graph.makers
        needs = {found.at[makers[name]] for name in segment.inputs if name in makers}
        found.add_segment(k, needs | {unsharded[b] for b in read})
    own = [t for b, t in unsharded.items() if groups[b].is_materialized]
    # Not before its own have come: three regions would be unsharded, one of them in flight.
    ahead = (found.add_prefetch(own[0]), own[0]) if own else (-1, -1)
    first = frozenset(unsharded.values())
    return DirectionTasks(found.tasks, found.actions, found.at, found.at, first, *ahead)


def backward_tasks(of: SegmentedRegion) -> DirectionTasks:
    """What runs in the backward: segments the other way round, deferred gradients, reductions."""
    found, region = _Writer(of, 1), of.region
    regathered = [g for g in region.groups if g.is_materialized and region.reshard_after_forward]
    copies = map(of.costs.copies, regathered)
    found.add(ActionKind.ENTER, Task(seconds=sum(c.packed_s + c.unpacked_s for c in copies)))
    last: dict[int, int] = {}
    for k in reversed(range(len(of.graph.segments))):
        readers = {found.at[u] for u in of.readers[k]} | {last[u] for u in of.deferred_readers[k]}
        found.add_segment(k, {0, *readers})
        last[k] = t = found.at[k]
        if k in of.deferred:
            seconds, saved_bytes, _ = of.deferred[k]
            task = found.tasks[t]
            found.tasks[t] = replace(task, seconds=max(0.0, task.seconds - seconds))
            deferred = Task((t,), seconds, deferred_bytes=saved_bytes)
            last[k] = found.add(ActionKind.WEIGHTS, deferred, k)
    for b, group in enumerate(region.groups):
        if group.requires_grad:
            segments = enumerate(of.graph.segments)
            needs = {0, *(last[k] for k, segment in segments if b in of.groups_of(segment))}
            found.add(ActionKind.REDUCE, _reduction(of, group, tuple(sorted(needs))), b)
    prefetch = found.add_prefetch(0) if regathered else -1
    return DirectionTasks(
        found.tasks, found.actions, found.at, last, frozenset({0}), prefetch, awaits=0
    )


def _reduction(of: SegmentedRegion, group: ParameterGroup, needs: tuple[int, ...]) -> Task:
    axes = group.gather or group.reduce
    copied_s = of.costs.copies(group).reduced_s
    if not axes:
        return Task(needs, copied_s)
    kind = "reduce_scatter" if group.gather else "all_reduce"
    seconds = of.costs.group_s(kind, group, axes)
    link = of.costs.costs.storage.group_link(axes).name
    return Task(needs, copied_s, link, seconds, floats=True)
