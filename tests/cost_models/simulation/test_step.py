"""A step from its events, against courses worked out by hand."""

from dataclasses import replace

import pytest

from meshfold.cost_models.simulation.step import simulate
from meshfold.ir.step_events import (
    AllGatherBucket,
    CollectiveEvent,
    Event,
    ParameterGroupEvents,
    ReduceBucket,
    RegionEvents,
    StepEvents,
)

GATHER = CollectiveEvent("all_gather", ("dp",), "network", 100, 2.0)
SCATTER = CollectiveEvent("reduce_scatter", ("dp",), "network", 100, 3.0)
INLINE = CollectiveEvent("all_reduce", ("tp",), "node", 10, 1.0)
BUCKET = ParameterGroupEvents(
    GATHER, SCATTER, unsharded_bytes=100, flat_bytes=200, result_bytes=50, saved=True
)
LAYER = RegionEvents(
    "B",
    forward=(
        Event("unshard", number=0),
        Event("forward_prefetch"),
        Event("compute", 4.0, inside_bytes=10),
    ),
    backward=(
        Event("pre_backward", inside_bytes=10),
        Event("compute", 5.0, inside_bytes=30),
        Event("reduce", number=0, inside_bytes=20),
    ),
    groups=(BUCKET,),
)


def two_layers(layer: RegionEvents = LAYER, **changes: object) -> StepEvents:
    """An activation of 7 after each forward until its backward, a gradient of 50 behind."""
    step = StepEvents((layer,), (0, 0), (), 1.0, (0, 7, 7, 50, 100), fixed_bytes=1000)
    return replace(step, **changes)  # type: ignore[arg-type]


def test_gathers_ahead_and_reductions_behind_without_contention() -> None:
    timeline = simulate(replace(two_layers(), slowdown=1.0))
    spans = [(t.collective.kind, t.instance, t.start_s, t.end_s) for t in timeline.transfers]
    assert spans == [
        ("all_gather", 0, 0.0, 2.0),  # nothing to hide behind
        ("all_gather", 1, 2.0, 4.0),  # while layer 0 computes until 6
        # Layer 1 stays unsharded: its forward ends at 10, its backward waits for nothing.
        ("all_gather", 0, 10.0, 12.0),
        ("reduce_scatter", 1, 15.0, 18.0),
        ("reduce_scatter", 0, 20.0, 23.0),  # exposed at the end
    ]
    step = timeline.step
    assert (step.compute_s, step.exposed_s, step.contention_s) == (19.0, 5.0, 0.0)
    assert step.step_s == 24.0
    gathers, scatters = step.overlap
    assert (gathers.count, gathers.hidden_s, gathers.exposed_s) == (3, 4.0, 2.0)
    assert (scatters.count, scatters.hidden_s, scatters.exposed_s) == (2, 3.0, 3.0)
    assert step.hidden_share == 7.0 / 12.0


def test_contention_is_told_apart() -> None:
    step = simulate(replace(two_layers(), slowdown=1.5)).step
    # Beside compute: gathers of 2 and 2, a reduction of 3.
    assert step.contention_s == pytest.approx(0.5 * (2 + 2 + 3))
    assert step.step_s == pytest.approx(24.0 + 3.5)


def test_memory_follows_gathers_buckets_and_moments() -> None:
    timeline = simulate(replace(two_layers(), slowdown=1.0))
    assert timeline.memory == (
        (2.0, 1000 + 200),  # layer 0 is copied out of what was gathered
        (2.0, 1000 + 200),  # and layer 1 in flight
        (2.0, 1000 + 200 + 10),
        (6.0, 1000 + 7 + 200),  # layer 0 released, layer 1 copied
        (6.0, 1000 + 7 + 100 + 10),
        (10.0, 1000 + 7 + 200 + 10),  # arrived at layer 1, layer 0 on its way
        (10.0, 1000 + 7 + 200 + 30),
        (15.0, 1000 + 7 + 100 + 20 + 250),  # layer 1 gave way to its gradients
        (15.0, 1000 + 50 + 200 + 200 + 10),  # their buffer is read until 18; layer 0 is copied
        (15.0, 1000 + 50 + 100 + 200 + 10),
        (15.0, 1000 + 50 + 100 + 200 + 30),
        (20.0, 1000 + 50 + 20 + 250),
        (23.0, 1000 + 100),  # the optimizer
    )
    assert (timeline.step.peak_bytes, timeline.step.peak_s) == (1460, 15.0)


def test_a_slow_link_leaves_buckets_in_flight() -> None:
    slow = replace(BUCKET, reduce=replace(SCATTER, seconds=30.0))
    timeline = simulate(replace(two_layers(replace(LAYER, groups=(slow,))), slowdown=1.0))
    # Layer 1's buffer is still read when layer 0 reduces.
    assert (20.0, 1000 + 50 + 20 + 250 + 200) in timeline.memory


def test_without_reshard_after_forward_parameters_are_gathered_once() -> None:
    stays = replace(LAYER, groups=(replace(BUCKET, saved=False),), reshard_after_forward=False)
    stays = replace(stays, backward=LAYER.backward[1:])
    timeline = simulate(replace(two_layers(stays), slowdown=1.0))
    assert [t.instance for t in timeline.transfers] == [0, 1, 1, 0]
    assert (6.0, 1000 + 7 + 200 + 10) in timeline.memory


def test_a_collective_in_the_graph_is_exposed_and_trailing_ones_come_last() -> None:
    layer = RegionEvents(
        "A",
        forward=(Event("compute", 2.0), Event("inline", collective=INLINE), Event("compute", 2.0)),
        backward=(Event("compute", 3.0),),
    )
    late = (replace(INLINE, seconds=4.0),)
    timeline = simulate(two_layers(layer, trailing=late))
    assert timeline.step.step_s == 2 * (5.0 + 3.0) + 4.0 + 1.0
    assert [(t.start_s, t.exposed_s) for t in timeline.transfers] == [(2, 1), (7, 1), (16, 4)]


def test_reductions_of_unsharded_gradients_keep_no_buffer() -> None:
    reduced = ParameterGroupEvents(
        None, replace(SCATTER, kind="all_reduce"), 0, 200, 200, saved=False
    )
    backward = LAYER.backward[1:]
    layer = RegionEvents("B", (Event("compute", 4.0),), backward, (reduced,))
    assert not layer.unshards
    memory = simulate(replace(two_layers(layer), slowdown=1.0)).memory
    assert (13.0, 1000 + 7 + 20 + 400) in memory and (13.0, 1000 + 50 + 30) in memory


def test_a_bucketed_reduction_starts_with_its_last_member() -> None:
    both = ReduceBucket(((1, 0), (0, 0)), replace(SCATTER, num_bytes=200, seconds=4.0))
    timeline = simulate(two_layers(reduce_buckets=(both,), slowdown=1.0))
    spans = [(t.collective.kind, t.instance, t.start_s, t.end_s) for t in timeline.transfers]
    assert spans[2:] == [("all_gather", 0, 10.0, 12.0), ("reduce_scatter", 0, 20.0, 24.0)]
    # The buffer of both is there from the first member on.
    assert timeline.memory[-6:] == (
        (15.0, 1000 + 7 + 100 + 20 + 400 + 50),
        (15.0, 1000 + 50 + 200 + 400 + 10),
        (15.0, 1000 + 50 + 100 + 400 + 10),
        (15.0, 1000 + 50 + 100 + 400 + 30),
        (20.0, 1000 + 50 + 20 + 400 + 50),
        (24.0, 1000 + 100),
    )
    step = timeline.step
    assert step.exposed_s == 2.0 + 4.0
    assert step.step_s == step.compute_s + step.exposed_s


@pytest.mark.parametrize("is_bucketed", [False, True])
def test_gradients_that_are_added_to_sums_have_no_buffer_besides(is_bucketed: bool) -> None:
    """The sum is resident until the backward of its instance is over, and then until the link is
    done with it; in a bucket with another that also has to come."""
    layer = replace(LAYER, groups=(replace(BUCKET, adds_to_sum=True),))
    both = ReduceBucket(((1, 0), (0, 0)), replace(SCATTER, num_bytes=200, seconds=4.0))
    timeline = simulate(two_layers(layer, reduce_buckets=(both,) * is_bucketed, slowdown=1.0))
    assert timeline.memory[-6:] == (
        (15.0, 1000 + 7 + 100 + 20 + 50),
        (15.0, 1000 + 50 + 200 + 200 + 10),
        (15.0, 1000 + 50 + 100 + 200 + 10),
        (15.0, 1000 + 50 + 100 + 200 + 30),
        (20.0, 1000 + 50 + 20 + 50 + 200 * is_bucketed),
        (24.0 if is_bucketed else 23.0, 1000 + 100),
    )


def test_bucketed_unsharded_gradients_are_resident_one_by_one() -> None:
    one = replace(SCATTER, kind="all_reduce")
    reduced = ParameterGroupEvents(None, one, 0, 200, 200, saved=False)
    layer = RegionEvents("B", (Event("compute", 4.0),), LAYER.backward[1:], (reduced,))
    both = ReduceBucket(((1, 0), (0, 0)), one)
    memory = simulate(two_layers(layer, reduce_buckets=(both,), slowdown=1.0)).memory
    # The member to come has its place already; the one that came is a gradient, resident as such.
    assert (13.0, 1000 + 7 + 20 + 400 + 200) in memory
    assert (13.0, 1000 + 50 + 30 + 200) in memory
    assert (18.0, 1000 + 50 + 20 + 400) in memory


def test_a_bucketed_gather_starts_where_its_first_member_would() -> None:
    """The last layer stays unsharded: the backward gathers the two before it, together."""
    three = StepEvents((LAYER,), (0,) * 3, (), 1.0, (0,) * 7, fixed_bytes=1000)
    both = AllGatherBucket(
        ((0, 0), (1, 0)), replace(GATHER, seconds=3.0), replace(GATHER, seconds=2.5)
    )
    timeline = simulate(replace(three, allgather_buckets=(both,), slowdown=1.0))
    spans = [
        (t.instance, t.start_s, t.end_s)
        for t in timeline.transfers
        if t.collective.kind == "all_gather"
    ]
    assert spans == [
        (0, 0.0, 3.0),  # both
        (2, 7.0, 9.0),  # while layer 1 computes: nothing is left to gather before
        (1, 15.0, 17.5),  # both again, beside layer 2's backward
    ]
    whole = max(num_bytes for now_s, num_bytes in timeline.memory if 15.0 <= now_s < 20.0)
    assert whole == 1000 + 3 * 100 + 30
    # In the forward their buffer, and layer 0 out of it.
    assert max(num_bytes for now_s, num_bytes in timeline.memory if now_s <= 3.0) == 1000 + 310
    assert timeline.step.step_s == 3 + 3 * 4 + 3 * 5 + 3 + 1


def test_bucketed_reductions_that_nobody_has_are_refused() -> None:
    for places in (((1, 0), (1, 0)), ((0, 1), (1, 0)), ((2, 0), (1, 0))):
        with pytest.raises(ValueError, match="is there twice, or no group that does this"):
            two_layers(reduce_buckets=(ReduceBucket(places, SCATTER),))


def test_events_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="resident_bytes: 2 instances have 5 moments, not 1"):
        two_layers(resident_bytes=(0,))
    with pytest.raises(ValueError, match="instances: there are 1 regions"):
        two_layers(instances=(0, 1))


def test_a_schedule_hides_what_eager_waits_for() -> None:
    """A collective started, compute beside it, then waited for; gathers start where `before`
    stands."""
    scheduled = replace(
        LAYER,
        backward=(
            Event("backward_unshard", inside_bytes=10),
            Event("backward_prefetch"),
            Event("start", number=3, collective=INLINE),
            Event("compute", 5.0, inside_bytes=30),
            Event("wait", number=3),
            Event("reduce", number=0, inside_bytes=20),
        ),
    )
    timeline = simulate(replace(two_layers(scheduled), slowdown=1.0))
    spans = [(t.collective.kind, t.instance, t.start_s, t.end_s) for t in timeline.transfers]
    assert spans[2:] == [
        ("all_gather", 0, 10.0, 12.0),
        ("all_reduce", 1, 10.0, 11.0),
        ("reduce_scatter", 1, 15.0, 18.0),
        ("all_reduce", 0, 15.0, 16.0),
        ("reduce_scatter", 0, 20.0, 23.0),
    ]
    eager = replace(
        LAYER, backward=(LAYER.backward[0], Event("inline", collective=INLINE), *LAYER.backward[1:])
    )
    # Both layers wait a second for theirs, the second one partly beside its own gather.
    assert simulate(replace(two_layers(eager), slowdown=1.0)).step.step_s == 26.0
    assert timeline.step.step_s == 24.0


def test_a_wait_without_a_start_is_refused() -> None:
    with pytest.raises(ValueError, match="wait 1 has no start"):
        replace(LAYER, backward=(Event("wait", number=1),))
    twice = (Event("start", number=1, collective=INLINE), *[Event("wait", number=1)] * 2)
    with pytest.raises(ValueError, match="wait 1 has no start"):
        replace(LAYER, forward=twice)
