"""Tables of bounds against exact stages and against the run level's relaxation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_stages import layer_costs, random_problem, seeds

from meshfold.passes.run.hull import lp_values
from meshfold.passes.run.search import solve_runs
from meshfold.passes.stages.problem import LayerRun, StageProblem
from meshfold.passes.stages.relaxation import least_overrun, relaxed_s, transient_groups
from meshfold.passes.stages.solved import StageCells


@settings(max_examples=100)
@given(seeds, st.integers(1, 4), st.integers(20, 200))
def test_bounds_every_exact_stage(seed, in_flight, budget):
    problem = random_problem(seed)
    cells = StageCells(problem, solve_runs)
    objectives = [cells.objective_s(run.layer) for run in problem.runs]
    width = problem.num_layers
    table = relaxed_s(problem, objectives, in_flight, budget, width)
    for first in range(problem.num_layers):
        for end in range(first + 1, problem.num_layers + 1):
            cell = cells.solve(first, end, in_flight, budget)
            bound = table[first, end - first]
            assert bound <= (np.inf if cell is None else cell.objective_s * (1 + 1e-9))
            if cell is not None:
                assert cell.memory_bytes <= budget
    assert np.all(np.isinf(table[:, 0]))
    assert np.all(np.isinf(table[-1]))


def test_is_the_linear_relaxation():
    draws = np.random.default_rng(5)
    runs = (LayerRun(layer_costs("a", draws, 8), 3), LayerRun(layer_costs("b", draws, 8), 4))
    problem = StageProblem.build(runs, num_stages=2, num_microbatches=4, memory_bytes=1)
    objectives = [run.layer.total_s for run in runs]
    for budget in (100, 120, 160, 300):
        types = [
            (run.layer.total_s, run.layer.state_bytes + 2 * run.layer.activation_bytes, run.count)
            for run in runs
        ]
        expected = float(lp_values(types, budget))
        found = relaxed_s(problem, objectives, 2, budget, 7)[0, 7]
        assert found == pytest.approx(expected, rel=1e-12)


def test_groups_cover_all_transients():
    draws = np.random.default_rng(1)
    layers = [layer_costs("a", draws, 40, transient=True)]
    groups = transient_groups(layers)
    for value in layers[0].transient_bytes.tolist():
        assert any(least <= value <= largest for largest, least in groups)


@settings(max_examples=100)
@given(seeds)
def test_least_overrun_is_a_lower_bound(seed):
    problem = random_problem(seed)
    in_flight = (1,) * problem.num_devices
    _, need_bytes, (first, end) = least_overrun(problem, in_flight)
    assert 0 <= first < end <= problem.num_layers
    assert StageCells(problem, solve_runs).solve(first, end, 1, need_bytes - 1) is None
