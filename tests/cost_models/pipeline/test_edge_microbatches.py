"""Makespans with longer passes at the edges of a step: by hand, between bounds, and folded."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfold.cost_models.pipeline.edge_microbatches import EdgeTimes, edge_ends
from meshfold.cost_models.pipeline.makespan import StageTimes, device_ends_s, simulate_actions
from meshfold.cost_models.pipeline.schedules import V_ORDERS, Schedule, ScheduleKind


def edges_of(
    schedule: Schedule,
    first: object = 0.0,
    last: object = 0.0,
    tail: object = 0.0,
    gathered: object = 0.0,
):
    of = first, last, tail, gathered
    return EdgeTimes(*(np.broadcast_to(x, (schedule.num_stages,)) for x in of))


def test_gathers_that_began_with_the_step_hold_a_stage_until_they_are_done() -> None:
    schedule = Schedule(ScheduleKind.ONE_F_ONE_B, 3, 1)
    times = StageTimes.build([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], hop_s=0.25)
    # F0 0 to 1 | 1.25 to 2.25, its parameters allow for 3 | 3.25 to 4.25, they allow for 4
    ends = edge_ends(schedule, times, edges_of(schedule, gathered=[0.0, 3.0, 4.0]))
    assert ends.held_s.tolist() == [0.0, 0.75, 0.0]
    assert ends.ends_s.tolist() == [4.25 + 2.0 + 2.25 + 2.25, 4.25 + 2.0 + 2.25, 4.25 + 2.0]


def test_two_stages_and_two_microbatches_by_hand() -> None:
    schedule = Schedule(ScheduleKind.ONE_F_ONE_B, 2, 2)
    times = StageTimes.build([1.0, 1.0], [2.0, 2.0], hop_s=0.25)
    edges = edges_of(schedule, first=[0.0, 0.5], tail=[3.0, 3.0])
    # device 0   F0 0 to 1   F1 1 to 2                   B0 5 to 7   B1 8 to 10, waits to 13
    # device 1   F0 1.25 to 2.75   B0 to 4.75   F1 to 5.75   B1 5.75 to 7.75, waits to 10.75
    # B1 of device 0 starts with the gradient of device 1, which is sent at 7.75.
    assert edge_ends(schedule, times, edges).ends_s.tolist() == [13.0, 10.75]


def test_a_tail_of_every_backward_delays_its_device_alone() -> None:
    schedule = Schedule(ScheduleKind.ONE_F_ONE_B, 2, 2)
    # Of the backward of device 1, 1.5 s come behind the gradient that it sends.
    times = StageTimes.build([1.0, 1.0], [2.0, 3.5], weight_s=[0.0, 1.5])
    # device 1   F0 1 to 2   B0 2 to 4, waits to 5.5   F1 5.5 to 6.5   B1 6.5 to 8.5, to 10
    # device 0   F0, F1 0 to 2                B0 4 to 6                B1 8.5 to 10.5
    assert edge_ends(schedule, times, edges_of(schedule)).ends_s.tolist() == [10.5, 10.0]
    whole = device_ends_s(schedule, times)
    assert whole.tolist() == [12.0, 10.0]


@st.composite
def cases(draw: st.DrawFn, most_rounds: int = 3) -> tuple[Schedule, StageTimes, EdgeTimes]:
    kind = draw(st.sampled_from(list(ScheduleKind)))
    p = draw(st.integers(1, 4))
    is_v = kind in V_ORDERS
    virtual = 2 if is_v else 1
    if "interleaved" in kind:
        virtual = draw(st.integers(1, 2))
    schedule = Schedule(kind, p, p * draw(st.integers(1, most_rounds)), virtual)
    n = schedule.num_stages
    rows = [
        np.array(draw(st.lists(st.integers(1, 8), min_size=n, max_size=n)), float) for _ in range(5)
    ]
    share = draw(st.sampled_from([0.0, 0.5])) if not schedule.splits_backward else 0.5
    times = StageTimes.build(rows[0], rows[1], weight_s=share * rows[1], hop_s=0.25)
    of = [draw(st.sampled_from([0.0, 0.25, 1.0])) * row for row in rows[2:]]
    return schedule, times, EdgeTimes(*of, gathered_s=p * of[0][::-1])


@settings(max_examples=150, deadline=None)
@given(cases())
def test_edges_never_make_a_step_faster_and_add_no_more_than_all_of_them(case) -> None:
    schedule, times, edges = case
    ends_s = edge_ends(schedule, times, edges).ends_s
    least = device_ends_s(schedule, times)
    if not schedule.splits_backward and schedule.num_stages > 1:
        busy_s = schedule.num_microbatches * times.total_s
        own = map(schedule.stages_of, range(schedule.num_devices))
        assert all(
            e >= sum(busy_s[s] for s in of) - 1e-9 for e, of in zip(ends_s, own, strict=True)
        )
        assert ends_s.max() <= least.max() + sum(
            x.sum() for x in (edges.forward_s, edges.backward_s, edges.weight_s, edges.gathered_s)
        )
        sent = replace(times, backward_s=times.backward_s - times.weight_s)
        least = device_ends_s(schedule, sent)
    assert (ends_s >= least - 1e-9).all()
    none = edges_of(schedule)
    if schedule.splits_backward or not times.weight_s.any():
        assert edge_ends(schedule, times, none).ends_s == pytest.approx(least)


@settings(max_examples=60, deadline=None)
@given(cases(most_rounds=12))
def test_long_pipelines_are_folded_to_what_all_their_actions_take(case) -> None:
    schedule, times, edges = case
    exact_s = edge_ends(schedule, times, edges, most_actions=10**6).ends_s.max()
    rounds = 6 * schedule.num_devices * schedule.num_stages * 3
    folded_s = edge_ends(schedule, times, edges, most_actions=rounds).ends_s.max()
    assert folded_s == pytest.approx(exact_s, rel=1e-2)


def test_one_microbatch_after_the_other_on_one_stage() -> None:
    schedule = Schedule(ScheduleKind.ONE_F_ONE_B, 1, 4)
    times = StageTimes.build([1.0], [2.0], weight_s=[0.5])
    edges = edges_of(schedule, 0.25, 0.5, 3.0)
    assert edge_ends(schedule, times, edges).ends_s.tolist() == [4 * 3.0 + 3.75]


def test_split_backwards_reduce_behind_their_weight_gradients() -> None:
    schedule = Schedule(ScheduleKind.ZERO_BUBBLE, 2, 2)
    times = StageTimes.build([1.0, 1.0], [2.0, 2.0], weight_s=1.0)
    edges = edges_of(schedule, tail=[1.0, 2.0])
    extra = {a: 1.0 + a.stage for d in schedule.actions() for a in d if str(a).endswith("W1")}
    assert len(extra) == 2
    expected = simulate_actions(schedule.actions(), times, extra)
    assert edge_ends(schedule, times, edges).ends_s.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["1f1b", "zero_bubble", "interleaved", "zbv"])
def test_the_largest_pipelines_take_a_fraction_of_a_second(kind: str) -> None:
    virtual = {"interleaved": 4, "zbv": 2}.get(kind, 1)
    schedule = Schedule(ScheduleKind(kind), 64, 512, virtual)
    shape = (schedule.num_stages,)
    times = StageTimes.build(np.linspace(1, 1.1, *shape), 2.0, weight_s=0.5, hop_s=0.1)
    start_s = time.process_time()
    assert edge_ends(schedule, times, edges_of(schedule, 0.1, 0.2, 0.3)).ends_s.max() > 512 * 3.0
    assert time.process_time() - start_s < 2.0  # 0.1 to 0.4, more on cores that others share
