"""Steps with stages and microbatches: by hand, against loops of steps in one pass, and bounds."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfold.cost_models.pipeline.makespan import StageTimes, device_ends_s
from meshfold.cost_models.pipeline.schedules import Schedule, ScheduleKind
from meshfold.cost_models.simulation.passes import simulate_ahead
from meshfold.cost_models.simulation.pipeline import (
    HostWaits,
    StageEvents,
    simulate_pipeline,
    simulate_stages,
)
from meshfold.cost_models.simulation.step import StepRun, simulate
from meshfold.ir.step_events import (
    CollectiveEvent,
    Event,
    OverlapRow,
    ParameterGroupEvents,
    RegionEvents,
    StepEvents,
)

NOTHING = np.zeros(0)


def layer(
    forward_s: float, backward_s: float, gather_s: float = 0.0, reduce_s: float = 0.0
) -> RegionEvents:
    """A layer whose parameters stay gathered. Seconds of 0: no collective."""

    def of(kind: str, seconds: float) -> CollectiveEvent | None:
        return CollectiveEvent(kind, ("dp",), "network", 100, seconds) if seconds else None

    group = ParameterGroupEvents(
        of("all_gather", gather_s),
        of("reduce_scatter", reduce_s),
        unsharded_bytes=100 if gather_s else 0,
        flat_bytes=100,
        result_bytes=50,
        saved=False,
    )
    return RegionEvents(
        "B",
        forward=(
            Event("unshard", number=0),
            Event("forward_prefetch"),
            Event("compute", forward_s),
        ),
        backward=(Event("compute", backward_s), Event("reduce", number=0)),
        groups=(group,),
        reshard_after_forward=False,
    )


def step(*layers: RegionEvents, slowdown: float = 1.0) -> StepEvents:
    numbers = tuple(range(len(layers)))
    moments = (0,) * (2 * len(layers) + 1)
    return StepEvents(layers, numbers, (), 0.0, moments, fixed_bytes=0, slowdown=slowdown)


def stage(
    *seconds: float, gather_s: float = 0.0, reduce_s: float = 0.0, slowdown: float = 1.0
) -> StageEvents:
    """A stage of layers (forward, twice that backward) under ZeRO 1."""
    edge = [layer(s, 2 * s, gather_s, reduce_s) for s in seconds]
    inner = [layer(s, 2 * s) for s in seconds]
    return StageEvents(step(*edge, slowdown=slowdown), step(*inner, slowdown=slowdown))


def one_f_one_b(p: int, m: int) -> Schedule:
    return Schedule(ScheduleKind.ONE_F_ONE_B, p, m)


def test_two_stages_and_two_microbatches_by_hand() -> None:
    stages = [
        replace(stage(1.0, 1.0, gather_s=0.5, reduce_s=3.0), tied_s=0.5, update_s=0.25),
        replace(stage(1.0, 1.0, gather_s=0.5, reduce_s=3.0), tied_s=0.5, update_s=0.25),
    ]
    found = simulate_pipeline(one_f_one_b(2, 2), stages, np.array([0.25]), launch_s=0.125)
    # F first of device 0 2.5: its first gather is exposed, the second hidden; device 1 has gathered
    # by 1. F 2, B 4. B last 4 to its gradient; reductions run from 2 on, 6 s long, so 4 s of them
    # are behind it.
    #
    # device 0   F0 0 to 2.5         F1 to 4.5           B0 9 to 13       B1 15 to 19, to 23
    # device 1   F0 2.75 to 4.75     B0 to 8.75          F1 to 10.75      B1 to 14.75, to 18.75
    #
    # Then the tied gradient, when both are ready, launch and update.
    assert found.step_s == 23.0 + 0.5 + 0.125 + 0.25
    assert found.compute_s == 12.0 + 0.375
    assert found.exposed_s == 0.5 + 4.0 + 0.5
    assert found.bubble_s == (9.0 - 4.5) + (15.0 - 13.0)
    assert found.overlap == (
        OverlapRow("all_gather", ("dp",), 2, 0.5, 0.5),
        OverlapRow("reduce_scatter", ("dp",), 2, 2.0, 4.0),
    )


def test_one_microbatch_of_one_stage_is_the_step_in_one_pass() -> None:
    events = stage(1.0, 3.0, gather_s=0.5, reduce_s=2.5, slowdown=1.25).edge
    whole = simulate(replace(events, optimizer_s=0.75)).step
    one = replace(StageEvents(events, events), update_s=0.5)
    found = simulate_pipeline(one_f_one_b(1, 1), [one], NOTHING, launch_s=0.25)
    assert found.step_s == pytest.approx(whole.step_s, rel=1e-12)
    assert found.contention_s == pytest.approx(whole.contention_s) and found.contention_s > 0
    assert found.exposed_s == pytest.approx(whole.exposed_s)
    assert found.overlap == whole.overlap and found.bubble_s == 0


def mixed(forward: StepEvents, backward: StepEvents) -> StepEvents:
    """The forward of one microbatch and the backward of another."""
    regions = tuple(
        replace(
            f,
            backward=b.backward,
            groups=tuple(
                replace(g, reduce=h.reduce) for g, h in zip(f.groups, b.groups, strict=True)
            ),
        )
        for f, b in zip(forward.regions, backward.regions, strict=True)
    )
    return replace(forward, regions=regions)


seconds = st.floats(0.0, 4.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(seconds, min_size=1, max_size=4), seconds, seconds, st.integers(2, 5))
def test_microbatches_of_one_stage_are_a_loop(
    layers: list[float], gather_s: float, reduce_s: float, count: int
) -> None:
    one = stage(*layers, gather_s=gather_s, reduce_s=reduce_s, slowdown=1.5)
    pairs = [(one.edge, one.inner), *[(one.inner, one.inner)] * (count - 2), (one.inner, one.edge)]
    loop_s = sum(simulate(mixed(*pair)).step.step_s for pair in pairs)
    found = simulate_pipeline(one_f_one_b(1, count), [one], NOTHING)
    assert found.step_s == pytest.approx(loop_s, rel=1e-12, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(seconds, min_size=1, max_size=3), min_size=1, max_size=4),
    seconds,
    seconds,
    st.integers(1, 6),
    seconds,
)
def test_a_simulated_step_is_above_the_bound_of_its_schedule(
    layers: list[list[float]], gather_s: float, reduce_s: float, count: int, hop_s: float
) -> None:
    stages = [stage(*of, gather_s=gather_s, reduce_s=reduce_s, slowdown=1.25) for of in layers]
    schedule = one_f_one_b(len(layers), count)
    hops_s = np.full(len(layers) - 1, hop_s)
    kernels_s = [sum(of) for of in layers]
    kernels = StageTimes.build(kernels_s, [2 * s for s in kernels_s], hop_s=hops_s)
    found = simulate_pipeline(schedule, stages, hops_s)
    assert found.step_s >= device_ends_s(schedule, kernels).max() * (1 - 1e-12)
    passes = simulate_stages(stages, schedule)
    extra_s = sum(
        (p.ahead.at_once_s if p.ahead else p.first_forward.seconds)
        - p.forward.seconds
        + (p.last_backward.seconds - p.backward.seconds)
        for p in passes
    )
    assert found.step_s <= device_ends_s(schedule, kernels).max() + extra_s + 1e-9


def test_a_stage_waits_for_what_the_fill_does_not_hide() -> None:
    stages = [stage(1.0, 1.0), stage(1.0, 1.0, gather_s=2.0)]
    # Device 1 gathers from 0 to 4; its input is there at 2. It runs its first layer beside the
    # second gather, that layer from 4 to 5.
    found = simulate_pipeline(one_f_one_b(2, 1), stages, np.zeros(1))
    assert found.step_s == 5.0 + 4.0 + 4.0
    # The device that ends last is the first, which waits for the second.
    assert found.exposed_s == 0.0 and found.bubble_s == 7.0
    turned = simulate_pipeline(
        one_f_one_b(2, 1), [stage(1.0), stage(1.0, gather_s=6.0)], np.array([0.5])
    )
    assert turned.step_s == 7.0 + 2.0 + 0.5 + 2.0


def test_the_last_device_counts_its_wait_as_exposed() -> None:
    stages = [stage(1.0), replace(stage(1.0, gather_s=2.0), update_s=10.0)]
    found = simulate_pipeline(one_f_one_b(2, 1), stages, np.zeros(1))
    assert found.step_s == 3.0 + 2.0 + 10.0
    assert (found.compute_s, found.exposed_s, found.bubble_s) == (13.0, 1.0, 1.0)
    assert found.overlap == (OverlapRow("all_gather", ("dp",), 1, 1.0, 1.0),)


def test_further_stages_of_the_first_device_gather_behind_its_first_pass() -> None:
    schedule = Schedule(ScheduleKind.INTERLEAVED, 2, 2, num_virtual_stages=2)
    stages = [stage(1.0), stage(1.0), stage(1.0, gather_s=8.0), stage(1.0, gather_s=3.0)]
    # Stage 2 gathers from 1 to 9 and ends its first forward at 10, stage 3 by 11.
    free = [stage(1.0)] * 4
    before = simulate_pipeline(schedule, free, np.zeros(3)).step_s
    # Without gathers stage 2 ends its first forward at 3.
    assert simulate_pipeline(schedule, stages, np.zeros(3)).step_s == before + 7.0


@settings(max_examples=60, deadline=None)
@given(st.lists(seconds, min_size=1, max_size=4), seconds, st.sampled_from([1.0, 1.5]), seconds)
def test_a_first_forward_ends_when_both_its_input_and_its_gathers_allow(
    layers: list[float], gather_s: float, slowdown: float, later_s: float
) -> None:
    """Against a forward behind a layer of `later_s` that gathers ahead as well."""
    events = stage(*layers, gather_s=gather_s, slowdown=slowdown).edge
    ahead = simulate_ahead(events, opens=True)
    run = StepRun(events, releases_all=True)
    run.gather_ahead(opens=True)
    # Waiting for an input is no compute: nothing is slowed down.
    for event in step(layer(later_s, 0.0), slowdown=1.0).regions[0].forward:
        idle_s = event.seconds
        while idle_s > 0:
            heads = [t.left_s for t in run.streams.transfers if not t.is_done]
            done_s = min([idle_s, *heads[:1]])
            run.streams._advance(done_s, done_s)
            idle_s -= done_s
    run.forward()
    exact_s = run.streams.now_s
    found_s = max(ahead.at_once_s, later_s + ahead.found.seconds)
    assert found_s <= exact_s + 1e-9
    assert slowdown > 1 or found_s == pytest.approx(exact_s)
    assert ahead.found.seconds <= ahead.at_once_s + 1e-12
    assert ahead.at_once_s <= ahead.found.seconds + ahead.gathered_s + 1e-9


def test_split_backwards_leave_weight_gradients_and_reductions_to_w() -> None:
    stages = [replace(stage(2.0, reduce_s=3.0), weight_s=1.0) for _ in range(2)]
    found = simulate_pipeline(Schedule(ScheduleKind.ZERO_BUBBLE, 2, 2), stages, np.zeros(1))
    # B 3, W 1; the reduction starts behind the backward, W last takes 4.
    # device 0   F0 0 to 2   F1 to 4                B0 7 to 10   W0 to 11   B1 12 to 15   W1 to 19
    # device 1   F0 2 to 4   B0 4 to 7   F1 to 9    B1 9 to 12   W0, W1 of device 1 to 17
    assert found.step_s == pytest.approx(19.0)


def test_what_waits_for_the_host_is_part_of_every_pass() -> None:
    host = HostWaits(forward_s=0.5, backward_s=1.0, once_s=4.0)
    stages = [replace(stage(1.0), host=host), stage(1.0)]
    found = simulate_pipeline(one_f_one_b(2, 2), stages, np.zeros(1))
    # device 0   F0 0 to 1.5   F1 to 3   B0 4.5 to 7.5        B1 to 10.5
    # device 1   F0 1.5 to 2.5   B0 to 4.5   F1 to 5.5   B1 to 7.5
    assert found.step_s == 10.5 + 4.0
    assert (found.compute_s, found.exposed_s) == (2 * 3.0, 2 * 1.5 + 4.0)
    assert found.bubble_s == 1.5


def test_a_stage_with_gathers_ahead_waits_for_the_host_behind_them() -> None:
    stages = [stage(1.0), replace(stage(1.0, gather_s=2.0), host=HostWaits(forward_s=0.5))]
    found = simulate_pipeline(one_f_one_b(2, 1), stages, np.zeros(1))
    # The gather of device 1 ends at 2, then it waits and runs: F to 3.5, B to 5.5, and 0 to 7.5.
    assert found.step_s == 7.5


def test_gradients_are_added_up_behind_what_a_split_backward_sends() -> None:
    stages = [replace(stage(2.0, reduce_s=3.0), weight_s=1.0, added_s=0.5) for _ in range(2)]
    found = simulate_pipeline(Schedule(ScheduleKind.ZERO_BUBBLE, 2, 2), stages, np.zeros(1))
    # As without, B 3 and W 1 (the last 4), and each W half a second longer: device 0 ends with
    # W0 10 to 11.5, B1 12 to 15 and W1 to 19.5.
    assert found.step_s == pytest.approx(19.5)
    whole = [replace(s, weight_s=0.0) for s in stages]
    found = simulate_pipeline(one_f_one_b(1, 2), whole[:1], NOTHING)
    assert found.step_s == 2 * (2.0 + 4.0 + 0.5) + 3.0


def test_equal_stages_are_simulated_once() -> None:
    one = stage(1.0, 2.0)
    first, second = simulate_stages([one, one], one_f_one_b(2, 1))
    assert first.forward is second.forward and first.last_backward is second.last_backward
