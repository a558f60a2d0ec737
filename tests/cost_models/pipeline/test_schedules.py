"""Orders of actions: complete, free of deadlock, with the in-flight numbers of the formulas."""

from types import SimpleNamespace
from typing import get_args

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from support.programs.makespans import parse_action

from meshfold.cost_models.pipeline.actions import Pass, StageAction
from meshfold.cost_models.pipeline.schedules import (
    V_ORDERS,
    Schedule,
    ScheduleKind,
    counted_in_flight,
    measured_in_flight,
    resident_by_virtual_stage,
)
from meshfold.errors import OptionError
from meshfold.ir.options import ScheduleName


def all_schedules(max_devices=6, max_microbatches=14):
    """Every schedule of these sizes, all warm-up depths, up to 3 virtual stages."""
    for p in range(1, max_devices + 1):
        for m in range(1, max_microbatches + 1):
            yield Schedule(ScheduleKind.GPIPE, p, m)
            for extra in range(p):
                yield Schedule(ScheduleKind.ONE_F_ONE_B, p, m, extra_warm_up=extra)
                yield Schedule(ScheduleKind.ZERO_BUBBLE, p, m, extra_warm_up=extra)
            if m % p == 0:
                for v in (1, 2, 3):
                    yield Schedule(ScheduleKind.INTERLEAVED, p, m, num_virtual_stages=v)
                    yield Schedule(ScheduleKind.INTERLEAVED_ZERO_BUBBLE, p, m, num_virtual_stages=v)
            for kind in V_ORDERS:
                yield Schedule(kind, p, m, num_virtual_stages=2)


def test_in_flight_is_what_the_order_holds():
    for schedule in all_schedules():
        assert measured_in_flight(schedule.actions()) == schedule.in_flight, str(schedule)


def test_every_pass_once():
    for schedule in all_schedules(4, 8):
        kinds = list(Pass) if schedule.splits_backward else [Pass.FORWARD, Pass.BACKWARD]
        expected = {
            StageAction(stage, kind, j)
            for stage in range(schedule.num_stages)
            for kind in kinds
            for j in range(schedule.num_microbatches)
        }
        actions = [a for device in schedule.actions() for a in device]
        assert len(actions) == len(expected) and set(actions) == expected
        for i, device in enumerate(schedule.actions()):
            assert {a.stage for a in device} == set(schedule.stages_of(i))


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("m", [4, 8, 16])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ScheduleKind.INTERLEAVED_ZERO_BUBBLE, "ScheduleInterleavedZeroBubble"),
        (ScheduleKind.ZBV, "ScheduleZBVZeroBubble"),
        (ScheduleKind.DUALPIPEV, "ScheduleDualPipeV"),
    ],
)
def test_orders_are_those_of_torch(kind, name, p, m):
    """Its I is our B, its B our B and W; empty places of its tables are waiting."""
    if kind is ScheduleKind.DUALPIPEV and m < 2 * p:
        pytest.skip("torch has no such schedule")
    ours, theirs = Schedule(kind, p, m, num_virtual_stages=2), getattr(torch_schedules, name)
    stated = SimpleNamespace(
        pp_group_size=p,
        _n_microbatches=m,
        num_stages=2 * p,
        n_local_stages=2,
        microbatches_per_round=p,
    )
    for device, actions in enumerate(ours.actions()):
        table = theirs._calculate_single_rank_operations(stated, device)
        parts = [part for a in table if a is not None for part in a.sub_actions or (a,)]
        expected = [text for part in parts for text in _texts(str(part))]
        assert list(map(str, actions)) == expected


def _texts(theirs: str) -> list[str]:
    if "B" in theirs:
        return [theirs, theirs.replace("B", "W")]
    return [theirs.replace("I", "B")]


def test_a_v_turns_at_the_last_device():
    schedule = Schedule(ScheduleKind.ZBV, 3, 5, num_virtual_stages=2)
    assert [schedule.stages_of(i) for i in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [schedule.device_of(s) for s in range(6)] == [0, 1, 2, 2, 1, 0]


def test_order_of_1f1b():
    first, last = Schedule(ScheduleKind.ONE_F_ONE_B, 2, 3).actions()
    assert " ".join(map(str, first)) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert " ".join(map(str, last)) == "1F0 1B0 1F1 1B1 1F2 1B2"


def test_order_of_zero_bubble():
    first, last = Schedule(ScheduleKind.ZERO_BUBBLE, 2, 2).actions()
    assert " ".join(map(str, first)) == "0F0 0F1 0B0 0W0 0B1 0W1"
    assert " ".join(map(str, last)) == "1F0 1B0 1F1 1B1 1W0 1W1"


def test_order_of_interleaved():
    first, _ = Schedule(ScheduleKind.INTERLEAVED, 2, 2, num_virtual_stages=2).actions()
    assert " ".join(map(str, first)) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"


def test_action_text_round_trips():
    for text in ("2F0", "0B17", "11W3"):
        assert str(parse_action(text)) == text
    with pytest.raises(ValueError, match="no action"):
        parse_action("2X0")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((ScheduleKind.GPIPE, 0, 4), "at least 1"),
        ((ScheduleKind.ONE_F_ONE_B, 2, 4, 2), "only interleaved schedules, zbv and dualpipev"),
        ((ScheduleKind.INTERLEAVED, 4, 6, 2), "multiple of 4"),
        ((ScheduleKind.ZBV, 4, 6), "zbv has 2 virtual stages per device"),
        ((ScheduleKind.ONE_F_ONE_B, 4, 8, 1, 4), "extra warm-up is 0 to 3"),
        ((ScheduleKind.GPIPE, 4, 8, 1, 1), "extra warm-up"),
    ],
)
def test_schedules_that_do_not_exist(arguments, message):
    with pytest.raises(OptionError, match=message):
        Schedule(*arguments)


@pytest.mark.parametrize("p, v", [(1, 1), (2, 2), (3, 2), (4, 3), (8, 2), (5, 4)])
@pytest.mark.parametrize("groups", [1, 2, 3, 9])
def test_resident_by_virtual_stage_counts_every_moment(p, v, groups):
    kind = ScheduleKind.INTERLEAVED if v > 1 else ScheduleKind.GPIPE
    schedule = Schedule(kind, p, p * groups, num_virtual_stages=v)
    for order, found, most in zip(
        schedule.actions(), resident_by_virtual_stage(schedule), schedule.in_flight, strict=True
    ):
        assert max(map(sum, found)) == most
        counts = [0] * v
        for action in order:
            if action.kind is Pass.WEIGHT_GRADIENT or (
                action.kind is Pass.BACKWARD and not schedule.splits_backward
            ):
                counts[action.stage // p] -= 1
            counts[action.stage // p] += action.kind is Pass.FORWARD
            assert any(all(a >= b for a, b in zip(o, counts, strict=True)) for o in found)


@pytest.mark.parametrize(
    "kind, p, v",
    [
        (ScheduleKind.INTERLEAVED_ZERO_BUBBLE, 4, 2),
        (ScheduleKind.INTERLEAVED_ZERO_BUBBLE, 3, 3),
        (ScheduleKind.ZBV, 4, 2),
        (ScheduleKind.DUALPIPEV, 4, 2),
        (ScheduleKind.INTERLEAVED, 4, 2),
    ],
)
@pytest.mark.parametrize("groups", [2, 9])
def test_microbatches_behind_their_backward_are_counted_apart(kind, p, v, groups):
    schedule = Schedule(kind, p, p * groups, num_virtual_stages=v)
    together = resident_by_virtual_stage(schedule)
    for device, order in enumerate(schedule.actions()):
        counts, found = [0] * 2 * v, set()
        for action in order:
            at = schedule.stages_of(device).index(action.stage)
            counts[at] += (action.kind is Pass.FORWARD) - (action.kind is Pass.BACKWARD)
            if schedule.splits_backward:
                counts[v + at] += (action.kind is Pass.BACKWARD) - (
                    action.kind is Pass.WEIGHT_GRADIENT
                )
            found.add(tuple(counts))
        apart = resident_by_virtual_stage(schedule, weights_apart=True)[device]
        assert set(apart) <= found
        for moment in found:
            assert any(all(a >= b for a, b in zip(o, moment, strict=True)) for o in apart)
        most = max(sum(n) for n in apart)
        assert most == max(map(sum, together[device]))


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_moments_of_a_split_backward_are_those_that_its_order_has(p):
    for m in range(1, 3 * p + 4):
        for extra in range(p):
            schedule = Schedule(ScheduleKind.ZERO_BUBBLE, p, m, extra_warm_up=extra)
            counted = resident_by_virtual_stage(schedule, weights_apart=True)
            assert counted_in_flight(schedule) == counted, str(schedule)


def test_pins_name_every_schedule():
    assert set(get_args(ScheduleName)) == {kind.value for kind in ScheduleKind}
