"""The fluid bound of a chain under its memory, against brute force and by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from support.search.stages import allowed_schedules, brute_force_s, random_problem, seeds

from meshfold.cost_models.pipeline.bubble_bounds import bubble_factor
from meshfold.cost_models.pipeline.schedules import ScheduleKind
from meshfold.passes.stages.memory_bound import fluid_step_s, memory_bound_s
from meshfold.passes.stages.problem import LayerCosts, LayerRun, StageProblem
from meshfold.passes.stages.search import search_faster_stages

ROUNDING = 1e-9
SINGLE = (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE)


@settings(max_examples=150)
@given(seeds)
def test_no_plan_is_faster(seed):
    problem = random_problem(seed)
    kind = SINGLE[seed % 3]
    schedules = [s for s in allowed_schedules(problem) if s.kind is kind]
    best_s = brute_force_s(problem, schedules)
    assert memory_bound_s(problem, {kind}) <= best_s * (1 + ROUNDING)
    every = memory_bound_s(problem, SINGLE)
    assert every == min(memory_bound_s(problem, {of}) for of in SINGLE)


@settings(max_examples=150)
@given(seeds)
def test_coarse_tables_rule_out_nothing_that_is_faster(seed):
    problem = random_problem(seed)
    schedules = allowed_schedules(problem)
    best_s = brute_force_s(problem, schedules)
    if np.isfinite(best_s):
        found = search_faster_stages(problem, schedules, best_s * 1.3)
        assert not isinstance(found, float)
        ruled_out = search_faster_stages(problem, schedules, best_s * 0.7)
        assert ruled_out == pytest.approx(best_s * 0.7) or ruled_out <= best_s


def two_layers(memory_bytes: int, state_bytes=(6, 2), seconds=((1.0, 2.0), (2.0, 4.0))):
    """Two equal layers on two devices, four microbatches; the slow strategy is the small one."""
    forward_s, backward_s = zip(*seconds, strict=True)
    layer = LayerCosts.build(
        "layer",
        ("fast", "small"),
        forward_s=forward_s,
        backward_s=backward_s,
        state_bytes=state_bytes,
        activation_bytes=0,
    )
    return StageProblem.build(
        (LayerRun(layer, 2),), num_stages=2, num_microbatches=4, memory_bytes=memory_bytes
    )


def test_by_hand():
    factor = bubble_factor(2, 4, 1)
    plenty = memory_bound_s(two_layers(6), {ScheduleKind.ONE_F_ONE_B})
    assert plenty == pytest.approx(max(6.0 * factor, 12.0))
    # 4 bytes are half of each strategy: 4.5 s a layer.
    half = memory_bound_s(two_layers(4), {ScheduleKind.ONE_F_ONE_B})
    assert half == pytest.approx(max(9.0 * factor, 18.0))
    assert memory_bound_s(two_layers(1), {ScheduleKind.ONE_F_ONE_B}) == np.inf
    assert memory_bound_s(two_layers(0), SINGLE) == np.inf


def test_what_nothing_is_known_of_has_no_bound():
    problem = two_layers(6)
    assert memory_bound_s(problem, {ScheduleKind.INTERLEAVED}) == 0.0
    assert memory_bound_s(problem, {*SINGLE, ScheduleKind.ZBV}) == 0.0


def test_layers_without_time():
    problem = two_layers(6, seconds=((0.0, 0.0), (0.0, 0.0)))
    assert fluid_step_s(problem, np.array([[2], [1]]), 2.0) == 0.0
