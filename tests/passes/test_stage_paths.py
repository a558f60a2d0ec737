"""Bounds of single cuts against every choice of strategies."""

import numpy as np
from hypothesis import given, settings
from support_stages import all_cuts, allowed_schedules, best_of_cut_s, random_problem, seeds

from meshfold.passes.run.search import solve_runs
from meshfold.passes.stages.paths import cut_bound_s
from meshfold.passes.stages.solved import StageCells


@settings(max_examples=150)
@given(seeds)
def test_no_strategies_beat_the_bound(seed):
    problem = random_problem(seed)
    solver = StageCells(problem, solve_runs)
    schedules = allowed_schedules(problem)
    schedule = schedules[seed % len(schedules)]
    for cuts in all_cuts(problem.num_layers, problem.num_devices):
        cells = [
            solver.solve(first, end, in_flight, int(budget))
            for first, end, in_flight, budget in zip(
                cuts, cuts[1:], schedule.in_flight, problem.memory_bytes, strict=False
            )
        ]
        best_s = best_of_cut_s(problem, schedule, cuts)
        if None in cells:
            assert best_s == np.inf
            continue
        assert cut_bound_s(problem, schedule, cuts, cells) <= best_s * (1 + 1e-9)
