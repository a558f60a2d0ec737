"""Which schedules a stage search is offered."""

from typing import get_args

import pytest

from meshfold.cost_models.pipeline.schedules import ScheduleKind
from meshfold.ir.options import ScheduleName
from meshfold.passes.stages.schedules import offered_schedules


def test_pins_name_the_kinds_there_are():
    assert get_args(ScheduleName) == tuple(ScheduleKind)


def test_warm_up_in_powers_of_two():
    found = offered_schedules(8, 64, 32)
    for kind in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE):
        assert [s.extra_warm_up for s in found if s.kind is kind] == [0, 1, 2, 4, 7]


def test_1f1b_that_is_pinned_is_the_published_one():
    (found,) = offered_schedules(8, 64, 32, ScheduleKind.ONE_F_ONE_B)
    assert found.warm_up == (7, 6, 5, 4, 3, 2, 1, 0)


@pytest.mark.parametrize(("p", "m"), [(4, 16), (4, 3), (2, 1), (1, 4)])
def test_no_two_run_the_same_actions(p, m):
    found = offered_schedules(p, m, 32)
    assert found
    assert len({s.actions() for s in found}) == len(found)


def test_a_pin_leaves_its_kind_or_nothing():
    assert {s.kind for s in offered_schedules(4, 16, 32, ScheduleKind.GPIPE)} == {"gpipe"}
    interleaved = offered_schedules(4, 16, 32, ScheduleKind.INTERLEAVED)
    assert [s.num_virtual_stages for s in interleaved] == [2, 3, 4]
    assert [s.num_virtual_stages for s in offered_schedules(4, 16, 32, None, 6)] == [6]
    assert [
        s.num_virtual_stages for s in offered_schedules(4, 16, 32, ScheduleKind.INTERLEAVED, 6)
    ] == [6]
    assert offered_schedules(4, 15, 32, ScheduleKind.INTERLEAVED) == ()
    assert offered_schedules(4, 16, 7, ScheduleKind.INTERLEAVED) == ()
    assert offered_schedules(4, 16, 32, ScheduleKind.GPIPE, 2) == ()
