"""Segments that nothing parts in either direction become one."""

from itertools import pairwise

import pytest
from support.programs.schedules import emitted
from torch import fx

from meshfold.codegen.chained_chunks.segment_fusion import (
    IntervalAction,
    actions_of,
    fusable_runs,
    interval_of,
    renumbered,
)
from meshfold.codegen.program.region_schedule import (
    ActionKind,
    OpsSegment,
    RegionAction,
    SegmentedGraph,
)
from meshfold.codegen.schedule.segments import SegmentLimits, fused_graph, segmented_graph

pytestmark = pytest.mark.xdist_group("schedules")

EPILOGUE = RegionAction(ActionKind.EPILOGUE)


def run(number: int) -> RegionAction:
    return RegionAction(ActionKind.FORWARD, number)


def places(text: str, tail: int = 0) -> list[IntervalAction]:
    actions = [RegionAction(ActionKind(word[0]), int(word[1:] or -1)) for word in text.split()]
    return interval_of(actions, tail)


def ops(count: int) -> SegmentedGraph:
    segment = OpsSegment((), (), fx.GraphModule({}, fx.Graph()), ())
    return SegmentedGraph((segment,) * count, {}, (), ())


def runs(
    forward: list[IntervalAction], backward: list[IntervalAction], *apart: int
) -> list[tuple[int, ...]]:
    return fusable_runs(ops(4), forward, backward, apart)


def test_a_period_names_what_the_region_before_has_left() -> None:
    actions = (
        run(0),
        EPILOGUE,
        run(1),
        run(2),
    )
    period = interval_of(actions, 1)
    assert period == [
        (run(0), False),
        (run(2), True),
        (run(1), False),
    ]
    assert actions_of(period) == (actions, 1)


def test_segments_that_follow_each_other_both_ways_are_one() -> None:
    forward = places("F0 F1 F2 F3")
    assert runs(forward, places("B3 B2 B1 B0")) == [(0, 1, 2, 3)]
    assert runs(forward, places("B3 B2 R0 B1 B0")) == [(0, 1), (2, 3)]
    assert runs(forward, places("B3 B1 B2 B0")) == []
    assert runs(forward, places("B3 B2 B1 B0"), 1) == [(2, 3)]
    assert runs(places("F0 O0 F1 F2 G F3"), places("B3 B2 B1 B0")) == [(1, 2)]


def test_gradients_of_weights_must_stand_together_too() -> None:
    forward = places("F0 F1 F2 F3")
    assert runs(forward, places("B3 B2 B1 B0 W3 W1")) == [(0, 1, 2, 3)]
    assert runs(forward, places("B3 B2 B1 B0 W3 G W1")) == [
        (0, 1, 2),
    ]
    assert runs(forward, places("B3 B2 W2 B1 B0 W1")) == [(0, 1), (2, 3)]


def test_the_epilogue_is_fused_with_its_like() -> None:
    """3 is in the tail, 2 is not, though they follow each other in the last region of a line."""
    forward = interval_of(
        [
            run(0),
            EPILOGUE,
            *(run(k) for k in (1, 2, 3)),
        ],
        1,
    )
    assert runs(forward, places("B3 B2 B1 B0")) == [(1, 2)]
    assert renumbered(forward, (0, 1, 1, 2)) == [
        (run(0), False),
        (run(2), True),
        (run(1), False),
    ]


def test_a_layer_has_no_two_segments_that_could_be_one() -> None:
    region = emitted("llama", "tp+sp", parts=2).regions[1]
    schedule = region.schedule
    assert schedule is not None
    forward = interval_of(schedule.forward, schedule.forward_epilogue)
    backward = interval_of(schedule.backward, schedule.backward_epilogue)
    apart = {*schedule.splits.values(), *schedule.joins.values()}
    assert fusable_runs(schedule.graph, forward, backward, apart) == []


def test_fused_segments_have_the_nodes_of_all() -> None:
    graph = emitted("llama", "tp+sp", parts=2).regions[1].graph.graph
    cuts = SegmentLimits(seconds=(1.0,) * 1000, shortest_s=1.0)
    short = segmented_graph(graph, cuts)
    pairs = pairwise(enumerate(short.segments))
    run = next(
        (a, b)
        for (a, left), (b, right) in pairs
        if left.kind == right.kind == "ops" and set(left.outputs) & set(right.inputs)
    )
    found, numbers = fused_graph(graph, cuts, [run])
    assert len(found.segments) == len(short.segments) - 1 == len(set(numbers))
    one = found.segments[numbers[run[0]]]
    assert numbers[run[0]] == numbers[run[1]] and one.kind == "ops"
    assert set(one.outputs) <= {name for k in run for name in short.segments[k].outputs}
