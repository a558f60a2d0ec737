"""Simulation of pipelines: event by event, by vectors, by formula, and between its bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.programs.makespans import (
    even_makespan_s,
    makespan_lower_bound_s,
    makespan_s,
    makespan_upper_bound_s,
    parse_action,
)

from meshfold.cost_models.pipeline.makespan import (
    StageTimes,
    critical_path,
    device_ends_s,
    simulate_actions,
)
from meshfold.cost_models.pipeline.schedules import V_ORDERS, Schedule, ScheduleKind
from meshfold.cost_models.pipeline.vector_makespan import interleaved_ends_s


@st.composite
def schedules(draw):
    kind = draw(st.sampled_from(list(ScheduleKind)))
    p = draw(st.integers(1, 6))
    if kind in V_ORDERS:
        return Schedule(kind, p, draw(st.integers(1, 24)), 2)
    if kind in (ScheduleKind.INTERLEAVED, ScheduleKind.INTERLEAVED_ZERO_BUBBLE):
        return Schedule(kind, p, p * draw(st.integers(1, 4)), draw(st.integers(1, 3)))
    extra = 0 if kind is ScheduleKind.GPIPE else draw(st.integers(0, p - 1))
    return Schedule(kind, p, draw(st.integers(1, 24)), extra_warm_up=extra)


@st.composite
def pipelines(draw, with_hops=True):
    schedule = draw(schedules())
    seconds = st.integers(1, 12)
    n = schedule.num_stages
    rows = [draw(st.lists(seconds, min_size=n, max_size=n)) for _ in range(2)]
    weight_s = np.array(rows[1]) * draw(st.sampled_from([0.0, 0.25, 0.5, 1.0]))
    hops = st.integers(0, 5 if with_hops else 0)
    hop_s = draw(st.lists(hops, min_size=n - 1, max_size=n - 1))
    times = StageTimes.build(*rows, weight_s=weight_s, hop_s=np.array(hop_s) / 4)
    return schedule, times.between_devices(schedule)


@settings(max_examples=300)
@given(pipelines())
def test_vectors_equal_events(pipeline):
    schedule, times = pipeline
    expected = simulate_actions(schedule.actions(), times)
    np.testing.assert_allclose(device_ends_s(schedule, times), expected, rtol=1e-12)


@pytest.mark.parametrize("kind", [ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE])
@pytest.mark.parametrize("spread, hop_s", [(0, 0.02), (0.05, 0.02), (0.003, 0), (0.3, 0.5)])
@pytest.mark.parametrize("extra", [0, 3, 5])
def test_skipped_rounds_are_exact(kind, spread, hop_s, extra):
    """Long enough for the growth to become steady, at or between whole periods."""
    draws = np.random.default_rng(7)
    times = StageTimes.build(
        1 + spread * draws.standard_normal(6),
        2 + spread * draws.standard_normal(6),
        weight_s=0.7,
        hop_s=hop_s,
    )
    for m in (120, 121, 123):
        schedule = Schedule(kind, 6, m, extra_warm_up=extra)
        expected = simulate_actions(schedule.actions(), times)
        np.testing.assert_allclose(device_ends_s(schedule, times), expected, rtol=1e-12)


@settings(max_examples=200)
@given(schedules(), st.integers(1, 9), st.integers(1, 9))
def test_even_stages_follow_the_formula(schedule, forward_s, backward_s):
    weight_s = 0.0
    if schedule.splits_backward:
        is_short = schedule.num_microbatches < 2 * schedule.num_devices - 1
        if schedule.extra_warm_up or schedule.num_virtual_stages > 1 or is_short:
            with pytest.raises(ValueError, match="no closed formula"):
                even_makespan_s(schedule, forward_s, backward_s, weight_s)
            return
        weight_s = min(forward_s, backward_s / 2)
    v = schedule.num_virtual_stages
    n = schedule.num_stages
    times = StageTimes.build(np.full(n, forward_s / v), backward_s / v, weight_s=weight_s / v)
    expected = even_makespan_s(schedule, forward_s, backward_s, weight_s)
    assert makespan_s(schedule, times) == pytest.approx(expected, rel=1e-12)


@settings(max_examples=200)
@given(pipelines())
def test_lower_bound_is_below(pipeline):
    schedule, times = pipeline
    assert makespan_lower_bound_s(schedule, times) <= makespan_s(schedule, times) * (1 + 1e-12)


@settings(max_examples=200)
@given(pipelines(with_hops=False))
def test_upper_bound_is_above(pipeline):
    schedule, times = pipeline
    if schedule.kind not in (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B):
        with pytest.raises(ValueError, match="no upper bound"):
            makespan_upper_bound_s(schedule, times)
        return
    assert makespan_s(schedule, times) <= makespan_upper_bound_s(schedule, times) * (1 + 1e-12)


def test_upper_bound_where_forward_and_backward_are_slow_in_different_stages():
    times = StageTimes.build([1.0, 1, 4, 1], [1.0, 4, 1, 1])
    schedule = Schedule(ScheduleKind.ONE_F_ONE_B, 4, 2)
    assert makespan_s(schedule, times) == 20 <= makespan_upper_bound_s(schedule, times)


def test_no_upper_bound_with_transfers():
    times = StageTimes.build(np.ones(2), 2.0, hop_s=0.1)
    with pytest.raises(ValueError, match="no upper bound"):
        makespan_upper_bound_s(Schedule(ScheduleKind.ONE_F_ONE_B, 2, 4), times)


def test_lower_bound_is_tight_for_even_stages():
    for schedule in (
        Schedule(ScheduleKind.ONE_F_ONE_B, 8, 32),
        Schedule(ScheduleKind.INTERLEAVED, 4, 16, num_virtual_stages=2),
    ):
        times = StageTimes.build(np.ones(schedule.num_stages), 2.0)
        expected = makespan_s(schedule, times)
        assert makespan_lower_bound_s(schedule, times) == pytest.approx(expected, rel=1e-12)


def test_deeper_warm_up_hides_transfers():
    """The extra forwards cover the latency that p - i microbatches in flight expose."""
    times = StageTimes.build(np.ones(8), 2.0, hop_s=0.15)
    steps = [
        makespan_s(Schedule(ScheduleKind.ONE_F_ONE_B, 8, 64, extra_warm_up=extra), times)
        for extra in (0, 1, 7)
    ]
    assert steps == sorted(steps, reverse=True) and steps[0] > 1.07 * steps[2]
    assert steps[2] == pytest.approx((64 + 7) * 3 + 2 * 0.15 * 7, rel=1e-12)


@settings(max_examples=100)
@given(pipelines(), st.integers(0, 30), st.sampled_from(["forward_s", "backward_s", "hop_s"]))
def test_faster_parts_never_slow_a_step(pipeline, index, part):
    schedule, times = pipeline
    values = {name: getattr(times, name).copy() for name in ("forward_s", "backward_s", "hop_s")}
    if not len(values[part]):
        return
    at = index % len(values[part])
    values[part][at] = max(values[part][at] / 2, times.weight_s[at] if part == "backward_s" else 0)
    faster = StageTimes.build(**values, weight_s=times.weight_s)
    assert makespan_s(schedule, faster) <= makespan_s(schedule, times) * (1 + 1e-12)


def test_deadlock_names_the_stuck_actions():
    actions = [
        [parse_action(text) for text in ("0F0", "0B0", "0F1", "0B1")],
        [parse_action(text) for text in ("1F0", "1F1", "1B0", "1B1")],
    ]
    with pytest.raises(ValueError, match="deadlocks: device 0 at 0B0, device 1 at 1F1"):
        simulate_actions(actions, StageTimes.build(np.ones(2), 1.0))


def test_times_that_make_no_sense():
    with pytest.raises(ValueError, match="negative"):
        StageTimes.build([1.0, -1.0], 1.0)
    with pytest.raises(ValueError, match="longer than the backward"):
        StageTimes.build([1.0, 1.0], 1.0, weight_s=2.0)
    with pytest.raises(ValueError, match="2 stages have times"):
        makespan_s(Schedule(ScheduleKind.GPIPE, 3, 1), StageTimes.build([1.0, 1.0], 1.0))


@settings(max_examples=100)
@given(pipelines())
def test_critical_path_is_as_long_as_the_step(pipeline):
    schedule, times = pipeline
    path = critical_path(schedule.actions(), times)
    parts = times.for_schedule(schedule)
    seconds = {"F": parts.forward_s, "B": parts.backward_s, "W": parts.weight_s}
    length_s = sum(seconds[action.kind][action.stage] for action in path)
    for left, right in zip(path, path[1:], strict=False):
        step = {"F": 1, "B": -1}.get(right.kind, 0)
        if step and right.stage == left.stage + step:
            same = left.microbatch == right.microbatch and left.kind == right.kind
            length_s += times.hop_s[min(left.stage, right.stage)] if same else 0
    assert path[0] == parse_action("0F0")
    assert length_s == pytest.approx(makespan_s(schedule, times), rel=1e-12)


def test_many_interleaved_pipelines_at_once():
    schedule = Schedule(ScheduleKind.INTERLEAVED, 4, 12, num_virtual_stages=3)
    draws = np.random.default_rng(5)
    f, b, hop = (draws.uniform(0.1, 2, (n, 7)) for n in (12, 12, 11))
    found = interleaved_ends_s(schedule, f, b, hop)
    for k in range(7):
        times = StageTimes.build(f[:, k], b[:, k], hop_s=hop[:, k])
        np.testing.assert_allclose(found[:, k], device_ends_s(schedule, times), rtol=1e-12)


@pytest.mark.parametrize("kind", V_ORDERS)
def test_nothing_travels_where_a_v_turns(kind):
    schedule = Schedule(kind, 2, 8, 2)
    free, turning, slow = (
        makespan_s(schedule, StageTimes.build(np.ones(4), 2.0, weight_s=1.0, hop_s=hop_s))
        for hop_s in ([0, 0, 0], [0, 9, 0], [0, 0, 9])
    )
    assert free == turning < slow
    alone = StageTimes.build(np.ones(2), 2.0, weight_s=1.0, hop_s=9.0)
    assert makespan_s(Schedule(kind, 1, 3, 2), alone) == 3 * 2 * (1 + 2)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_a_v_has_the_least_bubble(p):
    """With F = B = W nobody waits but to begin: device i does after i forwards of half a device's
    layers, and has its work in one piece."""
    m = 4 * p
    steps = {}
    for kind, v in (
        (ScheduleKind.ONE_F_ONE_B, 1),
        (ScheduleKind.ZERO_BUBBLE, 1),
        (ScheduleKind.INTERLEAVED_ZERO_BUBBLE, 2),
        (ScheduleKind.ZBV, 2),
    ):
        times = StageTimes.build(np.full(v * p, 2 / v), 4 / v, weight_s=2 / v)
        steps[kind] = makespan_s(Schedule(kind, p, m, v), times)
    assert list(steps.values()) == sorted(steps.values(), reverse=True)
    assert 6 * m <= steps[ScheduleKind.ZBV] <= 6 * m + p - 1
