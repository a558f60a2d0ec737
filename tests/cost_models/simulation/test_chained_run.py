"""Instances whose epilogues run within the next one, in the simulated step."""

from dataclasses import replace

from meshfold.cost_models.simulation.chained_run import split_epilogue
from meshfold.cost_models.simulation.step import simulate
from meshfold.ir.step_events import (
    CollectiveEvent,
    Event,
    ParameterGroupEvents,
    RegionEvents,
    StepEvents,
)

SEND = CollectiveEvent("reduce_scatter", ("tp",), "nvlink", 8, 2.0)
GATHER = CollectiveEvent("all_gather", ("dp",), "ib", 8, 1.0)

FORWARD = (
    Event("compute", 3.0, 10),
    Event("run_epilogue"),
    Event("consume", number=0),
    Event("compute", 1.0, 30),
    Event("start", inside_bytes=40, number=0, collective=SEND),
    Event("epilogue"),
    Event("wait", number=0),
    Event("compute", 0.5, 20),
    Event("produce", number=0),
)
LAYER = RegionEvents("B", FORWARD, (Event("compute", 1.0, 5),))


def step(layer: RegionEvents = LAYER, count: int = 2) -> StepEvents:
    """held_bytes: 100 more with every forward."""
    resident = (*(100 * k for k in range(count)), *(100 * k for k in reversed(range(count))), 0)
    return StepEvents((layer,), (0,) * count, (), 0.0, resident, 1000, 1.0)


def last_unchained(layer: RegionEvents) -> StepEvents:
    """Two instances, of which the last keeps nothing for another one."""
    events = tuple(e for e in layer.forward if e.kind != "epilogue")
    first = tuple(e for e in layer.forward if e.kind not in ("run_epilogue", "consume"))
    regions = replace(layer, forward=first), replace(layer, forward=events)
    return replace(step(layer), regions=regions, instances=(0, 1))


def test_an_epilogue_is_split_step_by_step() -> None:
    body, epilogue = split_epilogue(7, FORWARD, 3)
    assert body == FORWARD[:5]
    assert epilogue.instance == 7 and epilogue.moment == 3
    assert list(epilogue.steps) == [FORWARD[6:]]
    assert split_epilogue(0, body, 0) == (body, replace(split_epilogue(0, (), 0)[1]))


def test_the_last_collective_runs_beside_the_next_instance() -> None:
    """3 + 1 | 3 beside 2 | 0.5 + 1, the last collective waited for | 0.5."""
    timeline = simulate(last_unchained(LAYER))
    assert [(t.instance, t.start_s, t.end_s) for t in timeline.transfers] == [
        (0, 4.0, 6.0),
        (1, 8.5, 10.5),
    ]
    assert timeline.step.exposed_s == 2.0
    assert timeline.step.step_s == 11.0 + 2.0
    # Alone each instance waits for its own.
    joined = tuple(e for e in FORWARD if e.kind not in ("epilogue", "run_epilogue", "consume"))
    assert simulate(step(replace(LAYER, forward=joined))).step.exposed_s == 4.0


def test_a_part_is_waited_for_where_it_is_taken() -> None:
    """Without a call the epilogue runs when its chunk is read, else at the end."""
    events = last_unchained(LAYER)
    uncalled = tuple(e for e in events.regions[1].forward if e.kind != "run_epilogue")
    regions = events.regions[0], replace(LAYER, forward=uncalled)
    assert simulate(replace(events, regions=regions)).transfers == simulate(events).transfers
    unread = tuple(e for e in uncalled if e.kind != "consume")
    found = simulate(replace(events, regions=(events.regions[0], replace(LAYER, forward=unread))))
    assert [(t.start_s, t.end_s) for t in found.transfers] == [(4.0, 6.0), (8.0, 10.0)]
    assert found.step.compute_s == 11.0


def test_both_instances_are_in_memory() -> None:
    """Of two that run beside each other what is inside either counts, above the moment of the
    first."""
    timeline = simulate(last_unchained(LAYER))
    forward = [num_bytes for s, num_bytes in timeline.memory if s < 11.0]
    # 10, 30, 40 alone; beside the 40: 10; then 20 of the epilogue beside 10; then the second alone.
    assert forward == [1010, 1030, 1040, 1050, 1030, 1130, 1140, 1120]


def test_parameters_stay_for_the_tail_and_gathers_ahead_wait_for_it() -> None:
    bucket = ParameterGroupEvents(GATHER, None, 1, 0, 0, saved=False)
    layer = replace(
        LAYER,
        forward=(Event("unshard", number=0), Event("forward_prefetch"), *FORWARD),
        groups=(bucket,),
    )
    events = step(layer, 3)
    starts = [t for t in simulate(events).transfers if t.collective is GATHER]
    # 1 to gather, 3 + 1, 2 on the link, 0.5: the first is over, the third may be gathered.
    assert [t.issued_s for t in starts] == [0.0, 1.0, 7.5]


def test_gradients_in_a_tail_are_those_of_the_instance_at_hand() -> None:
    """A reduction in an epilogue keeps its buffer, and no result twice."""
    scatter = CollectiveEvent("reduce_scatter", ("dp",), "ib", 8, 1.0)
    bucket = ParameterGroupEvents(None, scatter, 0, 7, 3, saved=False)
    backward = (
        Event("run_epilogue"),
        Event("compute", 2.0, 5),
        Event("epilogue"),
        Event("compute", 1.0, 5),
        Event("epilogue"),
        Event("reduce", inside_bytes=5, number=0),
    )
    first = tuple(e for e in backward if e.kind != "epilogue")
    layers = (
        RegionEvents("A", (), first, (bucket,)),
        RegionEvents("B", (), backward, (bucket,)),
    )
    timeline = simulate(StepEvents(layers, (0, 1), (), 0.0, (0, 0, 0, 0, 0), 0, 1.0))
    # Last: 2 | its epilogue: 1, before what is first's own: 2, reduce | 1, reduce.
    assert timeline.step.compute_s == 6.0
    reductions = [(t.instance, t.start_s) for t in timeline.transfers]
    assert reductions == [(0, 6.0), (1, 7.0)]
    assert max(num_bytes for _, num_bytes in timeline.memory) == 5 + 5 + 7 + 3 + 7 + 3
