"""Action lists: their text, and what is refused before anything runs."""

import pytest
from support.programs.makespans import parse_actions

from meshfold.cost_models.pipeline.action_checks import check_actions
from meshfold.cost_models.pipeline.actions import actions_text
from meshfold.cost_models.pipeline.schedules import V_ORDERS, Schedule, ScheduleKind
from meshfold.errors import OptionError

CHUNKS = {
    ScheduleKind.INTERLEAVED: (1, 2, 3),
    ScheduleKind.INTERLEAVED_ZERO_BUBBLE: (1, 2, 3),
    **dict.fromkeys(V_ORDERS, (2,)),
}
SCHEDULES = [
    Schedule(kind, p, m, num_virtual_stages=v)
    for kind in ScheduleKind
    for p in (1, 2, 4)
    for m in (4, 8)
    for v in CHUNKS.get(kind, (1,))
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_schedule_round_trips_and_can_run(schedule: Schedule) -> None:
    actions = schedule.actions()
    assert Schedule.parse(str(schedule)) == schedule
    assert parse_actions(actions_text(actions)) == actions
    check_actions(actions, schedule)


def test_text_has_a_line_per_device() -> None:
    actions = Schedule(ScheduleKind.ONE_F_ONE_B, 2, 2).actions()
    assert actions_text(actions) == "0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0: 0B0 0F0\n1: 1F0 1B0\n", "deadlocks: device 0 at 0B0"),
        ("0: 0F0 0B0\n1: 1F0\n", "1B0 occurs 0 times"),
        ("0: 0F0 0B0 0B0\n1: 1F0 1B0\n", "0B0 occurs 2 times"),
        ("0: 0F0 0B0 1F0\n1: 1B0\n", "1F0 does not belong on device 0"),
        ("0: 0F0 0F1 0B0 0B1\n1: 1F1 1F0 1B0 1B1\n", "sends 0F0 where device 1 waits for 0F1"),
    ],
)
def test_lists_that_cannot_run_are_refused(text: str, says: str) -> None:
    count = 2 if "F1" in text else 1
    with pytest.raises(OptionError, match=says):
        check_actions(parse_actions(text), Schedule(ScheduleKind.ONE_F_ONE_B, 2, count))


def test_bad_texts() -> None:
    with pytest.raises(ValueError, match="line 2 is of device '2'"):
        parse_actions("0: 0F0\n2: 1F0\n")
    with pytest.raises(OptionError, match="'fast' is no schedule"):
        Schedule.parse("fast")
