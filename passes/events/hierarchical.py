"""Hierarchical all-reduces of gradients (meshfold.ir.node_groups): what they cost, and where they
pay.

    step            bytes   group                           link
    reduce-scatter   s       k ranks of a node               in a node
    all-reduce       s / k   m ranks, one per node, of       network, a port of its own for each of
                             which there are k groups        the k groups
    all-gather       s       k ranks of a node               in a node

With r, a, g their seconds for one of c pieces, which start in turn, an all-reduce alone takes

    max(r + a + g + (c - 1) max(r, a, g), c (r + g))
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from meshfold.cost_models.hardware.topology import GroupShape
from meshfold.cost_models.op_costs.collective_time import collective_s
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.hierarchical_all_reduce import HierarchicalAllReduce, HierarchicalSplit
from meshfold.ir.node_groups import ACROSS_NODES, IN_NODE, node_levels
from meshfold.ir.step_events import CollectiveEvent, RegionEvents, StepEvents
from meshfold.passes.events.region import collective

FACTOR = 2
"""Ratio of one size of pieces to the next that is tried."""
CLEARLY = 1.25
"""Times slower, so that smaller pieces are no use where compute overlaps either."""


def hierarchical_on(costs: CostModel, piece_bytes: int) -> HierarchicalAllReduce:
    """The hierarchical all-reduces on the mesh of `costs`."""
    return HierarchicalAllReduce(node_levels(costs.cluster, costs.mesh), piece_bytes)


def in_steps(of: CollectiveEvent, split: HierarchicalSplit, costs: CostModel) -> CollectiveEvent:
    """An all-reduce as a hierarchical one."""
    near = GroupShape(split.ranks, 1, split.ranks, split.ranks)
    far = GroupShape(split.nodes, split.nodes, 1, 1)
    piece = -(-of.num_bytes // split.pieces)
    share = -(-piece // split.ranks)
    steps = tuple(
        CollectiveEvent(
            kind,
            (*of.axes, level),
            (costs.cluster.network if shape.crosses_nodes else costs.node_link).name,
            num_bytes,
            collective_s(kind, num_bytes, shape, costs.node_link, costs.cluster.network),
        )
        for kind, level, num_bytes, shape in (
            ("reduce_scatter", IN_NODE, piece, near),
            ("all_reduce", ACROSS_NODES, share, far),
            ("all_gather", IN_NODE, piece, near),
        )
    )
    seconds = [step.seconds for step in steps]
    one_by_one_s = sum(seconds) + (split.pieces - 1) * max(seconds)
    in_node_s = split.pieces * (seconds[0] + seconds[2])
    return replace(of, seconds=max(one_by_one_s, in_node_s), steps=steps, pieces=split.pieces)


def hierarchical_events(events: StepEvents, piece_bytes: int, costs: CostModel) -> StepEvents:
    """The same step with hierarchical all-reduces of gradients, in pieces of piece_bytes (see
    HierarchicalAllReduce); 0: none."""
    hierarchical = hierarchical_on(costs, piece_bytes) if piece_bytes else None

    def changed(of: CollectiveEvent) -> CollectiveEvent:
        if of.kind != "all_reduce":
            return of
        split = hierarchical.split(of.axes, of.num_bytes) if hierarchical else None
        if split is not None:
            return in_steps(of, split, costs)
        if of.steps:
            own = costs.storage
            return collective(of.kind, of.num_bytes, [own.mesh.index(a) for a in of.axes], own)
        return of

    return _with_all_reduces(events, changed)


def without_all_reduces(events: StepEvents) -> StepEvents:
    """The same step if all-reduces took no time, which none of any pieces is faster than."""

    def changed(of: CollectiveEvent) -> CollectiveEvent:
        is_one = of.kind == "all_reduce"
        return replace(of, seconds=0.0, steps=(), pieces=1) if is_one else of

    return _with_all_reduces(events, changed)


def _with_all_reduces(
    events: StepEvents, changed: Callable[[CollectiveEvent], CollectiveEvent]
) -> StepEvents:
    """The same step with other reductions of gradients."""

    def of_region(region: RegionEvents) -> RegionEvents:
        groups = tuple(
            g if g.reduce is None else replace(g, reduce=changed(g.reduce)) for g in region.groups
        )
        return replace(region, groups=groups)

    return replace(
        events,
        regions=tuple(map(of_region, events.regions)),
        trailing=tuple(map(changed, events.trailing)),
        reduce_buckets=tuple(
            replace(m, collective=changed(m.collective)) for m in events.reduce_buckets
        ),
    )


def piece_sizes(events: StepEvents, costs: CostModel) -> Iterator[int]:
    """Sizes of pieces to try: all of the largest all-reduce that can be hierarchical, and smaller
    ones until it is clearly slower alone; none where none can."""
    levels = node_levels(costs.cluster, costs.mesh)
    able = [c for c in _all_reduces(events) if levels.sizes(c.axes) is not None]
    if not able:
        return
    largest = max(able, key=lambda c: c.num_bytes)
    size, least_s = largest.num_bytes, math.inf
    while size:
        split = HierarchicalAllReduce(levels, size).split(largest.axes, largest.num_bytes)
        assert split is not None
        seconds = in_steps(largest, split, costs).seconds
        if seconds > CLEARLY * least_s:
            return
        yield size
        size, least_s = size // FACTOR, min(least_s, seconds)


def _all_reduces(events: StepEvents) -> Iterator[CollectiveEvent]:
    """All-reduces that run: buckets instead of their members."""
    yield from (m.collective for m in events.reduce_buckets if m.collective.kind == "all_reduce")
    yield from (c for c in events.trailing if c.kind == "all_reduce")
    bucketed = {group for m in events.reduce_buckets for group in m.groups}
    for k, r in enumerate(events.instances):
        for number, group in enumerate(events.regions[r].groups):
            of = group.reduce
            if of is not None and of.kind == "all_reduce" and (k, number) not in bucketed:
                yield of
