"""Bounds of single divisions against every choice of strategies."""

import numpy as np
from hypothesis import given, settings
from support.search.stages import (
    all_boundaries,
    allowed_schedules,
    best_of_boundaries_s,
    random_problem,
    seeds,
)

from meshfold.cost_models.pipeline.schedules import counted_in_flight
from meshfold.passes.stages.paths import critical_path_bound_s
from meshfold.passes.stages.solved import StageSolver


@settings(max_examples=150)
@given(seeds)
def test_no_strategies_beat_the_bound(seed):
    problem = random_problem(seed)
    solver = StageSolver(problem)
    schedules = allowed_schedules(problem)
    schedule = schedules[seed % len(schedules)]
    for boundaries in all_boundaries(problem.num_layers, problem.num_devices):
        moments = counted_in_flight(schedule)
        asked = list(zip(boundaries, boundaries[1:], moments, problem.memory_bytes, strict=False))
        solved_stages = [solver.solve(*of, int(budget)) for *of, budget in asked]
        best_s = best_of_boundaries_s(problem, schedule, boundaries)
        if None in solved_stages:
            proven_s = [solver.proven_s(*of, int(budget)) for *of, budget in asked]
            assert best_s == np.inf or np.inf not in proven_s
            continue
        assert critical_path_bound_s(problem, schedule, boundaries, solved_stages) <= best_s * (
            1 + 1e-9
        )
