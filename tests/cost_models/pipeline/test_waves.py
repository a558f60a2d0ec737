"""Waves of actions against the simulation one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfold.cost_models.pipeline.actions import Pass, StageAction
from meshfold.cost_models.pipeline.makespan import StageTimes, simulate_actions
from meshfold.cost_models.pipeline.schedules import Schedule, ScheduleKind
from meshfold.cost_models.pipeline.waves import Waves

KINDS = (
    (ScheduleKind.ZERO_BUBBLE, 1),
    (ScheduleKind.ONE_F_ONE_B, 1),
    (ScheduleKind.INTERLEAVED_ZERO_BUBBLE, 2),
    (ScheduleKind.INTERLEAVED_ZERO_BUBBLE, 3),
    (ScheduleKind.ZBV, 2),
    (ScheduleKind.DUALPIPEV, 2),
)


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_equal_to_the_simulation(seed: int) -> None:
    draws = np.random.default_rng(seed)
    kind, v = KINDS[seed % len(KINDS)]
    p = int(draws.integers(2, 5))
    schedule = Schedule(kind, p, p * int(draws.integers(1, 5)), num_virtual_stages=v)
    actions, stages, n = schedule.actions(), schedule.num_stages, 3
    forward, rest, weight = draws.integers(0, 9, (3, stages, n)).astype(float)
    weight *= schedule.splits_backward
    hop = draws.integers(0, 4, (stages - 1, n)).astype(float)
    found = Waves.of(actions).ends_s(forward, rest, weight, hop)
    for k in range(n):
        times = StageTimes.build(
            forward[:, k], (rest + weight)[:, k], weight_s=weight[:, k], hop_s=hop[:, k]
        )
        np.testing.assert_allclose(found[:, k], simulate_actions(actions, times), rtol=1e-13)


def test_by_hand() -> None:
    # Device 1 waits 2 + 1 s for its input, then device 0 2 s for the gradient and 1 s on the way.
    schedule = Schedule(ScheduleKind.GPIPE, 2, 1)
    column = np.array([[2.0], [1.0]])
    nothing = np.zeros((2, 1))
    found = Waves.of(schedule.actions()).ends_s(column, 2 * column, nothing, np.ones((1, 1)))
    assert found[:, 0].tolist() == [2 + 1 + 1 + 2 + 1 + 4, 2 + 1 + 1 + 2]


def test_an_order_that_deadlocks_is_refused() -> None:
    backward, forward = StageAction(0, Pass.BACKWARD, 0), StageAction(0, Pass.FORWARD, 0)
    last = StageAction(1, Pass.FORWARD, 0), StageAction(1, Pass.BACKWARD, 0)
    with pytest.raises(ValueError, match="deadlocks"):
        Waves.of(((backward, forward), last))
