"""All-reduces of gradients in phases (meshfold.ir.node_groups): what they cost, and in which steps they
pay.

    phase            bytes   group                           link
    reduce-scatter   s       k ranks of a node               in a node
    all-reduce       s / k   m ranks, one per node, of       network, a port of its own for each of
                             which there are k groups        the k groups
    all-gather       s       k ranks of a node               in a node

With r, a, g their seconds for one of c pieces, which start in turn, an all-reduce alone takes

    max(r + a + g + (c - 1) max(r, a, g), c (r + g))
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from meshfold.cost_models.hardware.topology import GroupShape
from meshfold.cost_models.op_costs.collective_time import collective_s
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.node_groups import ACROSS_NODES, IN_NODE, Cut, Hierarchy, node_levels
from meshfold.ir.step_events import Collective, RegionEvents, StepEvents
from meshfold.passes.events.region import collective

FACTOR = 2
"""From one size of pieces to the next that is tried."""
CLEARLY = 1.25
"""Times slower, so that smaller pieces are no use beside compute either."""


def hierarchy_of(costs: CostModel, piece_bytes: int) -> Hierarchy:
    """On the mesh of `costs`."""
    return Hierarchy(node_levels(costs.cluster, costs.mesh), piece_bytes)


def in_phases(of: Collective, cut: Cut, costs: CostModel) -> Collective:
    """An all-reduce that is cut so."""
    near = GroupShape(cut.ranks, 1, cut.ranks, cut.ranks)
    far = GroupShape(cut.nodes, cut.nodes, 1, 1)
    piece = -(-of.num_bytes // cut.pieces)
    share = -(-piece // cut.ranks)
    phases = tuple(
        Collective(
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
    seconds = [phase.seconds for phase in phases]
    one_by_one_s = sum(seconds) + (cut.pieces - 1) * max(seconds)
    in_node_s = cut.pieces * (seconds[0] + seconds[2])
    return replace(of, seconds=max(one_by_one_s, in_node_s), phases=phases, pieces=cut.pieces)


def phased_events(events: StepEvents, piece_bytes: int, costs: CostModel) -> StepEvents:
    """The same step with all-reduces of gradients in phases, in pieces of piece_bytes (see
    Hierarchy); 0: none."""
    hierarchy = hierarchy_of(costs, piece_bytes) if piece_bytes else None

    def changed(of: Collective) -> Collective:
        if of.kind != "all_reduce":
            return of
        cut = hierarchy.cut(of.axes, of.num_bytes) if hierarchy else None
        if cut is not None:
            return in_phases(of, cut, costs)
        if of.phases:
            return collective(of.kind, of.num_bytes, [costs.mesh.index(a) for a in of.axes], costs)
        return of

    def of_region(region: RegionEvents) -> RegionEvents:
        buckets = tuple(
            b if b.reduce is None else replace(b, reduce=changed(b.reduce)) for b in region.buckets
        )
        return replace(region, buckets=buckets)

    return replace(
        events,
        regions=tuple(map(of_region, events.regions)),
        late=tuple(map(changed, events.late)),
        merged=tuple(replace(m, collective=changed(m.collective)) for m in events.merged),
    )


def piece_sizes(events: StepEvents, costs: CostModel) -> Iterator[int]:
    """Sizes of pieces to try: the largest all-reduce that can run in phases whole, and smaller ones
    until that is clearly slower alone; none where none can."""
    levels = node_levels(costs.cluster, costs.mesh)
    able = [c for c in _all_reduces(events) if levels.sizes(c.axes) is not None]
    if not able:
        return
    largest = max(able, key=lambda c: c.num_bytes)
    size, least_s = largest.num_bytes, math.inf
    while size:
        cut = Hierarchy(levels, size).cut(largest.axes, largest.num_bytes)
        assert cut is not None
        seconds = in_phases(largest, cut, costs).seconds
        if seconds > CLEARLY * least_s:
            return
        yield size
        size, least_s = size // FACTOR, min(least_s, seconds)


def _all_reduces(events: StepEvents) -> Iterator[Collective]:
    """That run: merged ones instead of their members."""
    yield from (m.collective for m in events.merged if m.collective.kind == "all_reduce")
    yield from (c for c in events.late if c.kind == "all_reduce")
    places = {place for m in events.merged for place in m.places}
    for k, r in enumerate(events.instances):
        for number, bucket in enumerate(events.regions[r].buckets):
            of = bucket.reduce
            if of is not None and of.kind == "all_reduce" and (k, number) not in places:
                yield of
