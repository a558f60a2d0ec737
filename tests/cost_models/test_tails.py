"""Instances whose last moves run within the next one, in the simulated step."""

from dataclasses import replace

from meshfold.cost_models.simulation.chained_run import cut_tail
from meshfold.cost_models.simulation.step import simulate
from meshfold.ir.step_events import BucketEvents, Collective, Event, RegionEvents, StepEvents

SEND = Collective("reduce_scatter", ("tp",), "nvlink", 8, 2.0)
GATHER = Collective("all_gather", ("dp",), "ib", 8, 1.0)

FORWARD = (
    Event("compute", 3.0, 10),
    Event("next"),
    Event("take", number=0),
    Event("compute", 1.0, 30),
    Event("start", inside_bytes=40, number=0, collective=SEND),
    Event("leave"),
    Event("wait", number=0),
    Event("compute", 0.5, 20),
    Event("give", number=0),
)
LAYER = RegionEvents("B", FORWARD, (Event("compute", 1.0, 5),))


def step(layer: RegionEvents = LAYER, count: int = 2) -> StepEvents:
    """held_bytes: 100 more with every forward."""
    held = (*(100 * k for k in range(count)), *(100 * k for k in reversed(range(count))), 0)
    return StepEvents((layer,), (0,) * count, (), 0.0, held, 1000, 1.0)


def last_whole(layer: RegionEvents) -> StepEvents:
    """Two instances, of which the last keeps nothing for another one."""
    events = tuple(e for e in layer.forward if e.action != "leave")
    first = tuple(e for e in layer.forward if e.action not in ("next", "take"))
    regions = replace(layer, forward=first), replace(layer, forward=events)
    return replace(step(layer), regions=regions, instances=(0, 1))


def test_a_tail_is_cut_move_by_move() -> None:
    body, tail = cut_tail(7, FORWARD, 3)
    assert body == FORWARD[:5]
    assert tail.instance == 7 and tail.moment == 3 and tail.is_left
    assert list(tail.moves) == [FORWARD[6:]]
    assert cut_tail(0, body, 0) == (body, replace(cut_tail(0, (), 0)[1]))


def test_the_last_collective_runs_beside_the_next_instance() -> None:
    """3 + 1 | 3 beside 2 | 0.5 + 1, the last collective waited for | 0.5."""
    course = simulate(last_whole(LAYER))
    assert [(t.instance, t.start_s, t.end_s) for t in course.transfers] == [
        (0, 4.0, 6.0),
        (1, 8.5, 10.5),
    ]
    assert course.step.exposed_s == 2.0
    assert course.step.step_s == 11.0 + 2.0
    # Alone each instance waits for its own.
    joined = tuple(e for e in FORWARD if e.action not in ("leave", "next", "take"))
    assert simulate(step(replace(LAYER, forward=joined))).step.exposed_s == 4.0


def test_a_part_is_waited_for_where_it_is_taken() -> None:
    """Without a call the tail runs when its part is read, and else at the end of the instance."""
    events = last_whole(LAYER)
    uncalled = tuple(e for e in events.regions[1].forward if e.action != "next")
    regions = events.regions[0], replace(LAYER, forward=uncalled)
    assert simulate(replace(events, regions=regions)).transfers == simulate(events).transfers
    unread = tuple(e for e in uncalled if e.action != "take")
    found = simulate(replace(events, regions=(events.regions[0], replace(LAYER, forward=unread))))
    assert [(t.start_s, t.end_s) for t in found.transfers] == [(4.0, 6.0), (8.0, 10.0)]
    assert found.step.compute_s == 11.0


def test_both_instances_are_in_memory() -> None:
    """Of two that run beside each other what is inside either counts, above the moment of the
    first."""
    course = simulate(last_whole(LAYER))
    forward = [num_bytes for s, num_bytes in course.memory if s < 11.0]
    # 10, 30, 40 alone; beside the 40: 10; then 20 of the tail beside 10; then the second alone.
    assert forward == [1010, 1030, 1040, 1050, 1030, 1130, 1140, 1120]


def test_parameters_stay_for_the_tail_and_gathers_ahead_wait_for_it() -> None:
    bucket = BucketEvents(GATHER, None, 1, 0, 0, saved=False)
    layer = replace(
        LAYER,
        forward=(Event("open", number=0), Event("ahead"), *FORWARD),
        buckets=(bucket,),
    )
    events = step(layer, 3)
    starts = [t for t in simulate(events).transfers if t.collective is GATHER]
    # 1 to gather, 3 + 1, 2 on the link, 0.5: the first is over, the third may be gathered.
    assert [t.issued_s for t in starts] == [0.0, 1.0, 7.5]


def test_gradients_in_a_tail_are_those_of_the_instance_at_hand() -> None:
    """A reduction in a tail keeps its buffer, and no result twice."""
    scatter = Collective("reduce_scatter", ("dp",), "ib", 8, 1.0)
    bucket = BucketEvents(None, scatter, 0, 7, 3, saved=False)
    backward = (
        Event("next"),
        Event("compute", 2.0, 5),
        Event("leave"),
        Event("compute", 1.0, 5),
        Event("leave"),
        Event("reduce", inside_bytes=5, number=0),
    )
    first = tuple(e for e in backward if e.action != "leave")
    layers = (
        RegionEvents("A", (), first, (bucket,)),
        RegionEvents("B", (), backward, (bucket,)),
    )
    course = simulate(StepEvents(layers, (0, 1), (), 0.0, (0, 0, 0, 0, 0), 0, 1.0))
    # Last: 2 | its tail: 1, before what is first's own: 2, the reduction at its end | 1, reduce.
    assert course.step.compute_s == 6.0
    reductions = [(t.instance, t.start_s) for t in course.transfers]
    assert reductions == [(0, 6.0), (1, 7.0)]
    assert max(num_bytes for _, num_bytes in course.memory) == 5 + 5 + 7 + 3 + 7 + 3
