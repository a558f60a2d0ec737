"""Tables of bounds against exact stages and against the run level's relaxation."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.search.stages import layer_costs, random_problem, seeds

from meshfold.passes.run.hull import lp_values
from meshfold.passes.run.problem import RunPlan
from meshfold.passes.run.search import solve_runs
from meshfold.passes.stages import solved as solved_stages
from meshfold.passes.stages.problem import LayerRun, StageProblem
from meshfold.passes.stages.relaxation import relaxed_s, transient_groups
from meshfold.passes.stages.solved import StageSolver


@settings(max_examples=100)
@given(seeds, st.integers(1, 4), st.integers(20, 200))
def test_bounds_every_exact_stage(seed, in_flight, budget):
    problem = random_problem(seed)
    solver = StageSolver(problem)
    objectives = [solver.objective_s(run.layer) for run in problem.runs]
    width = problem.num_layers
    table = relaxed_s(problem, objectives, ((in_flight,),), budget, width)
    for first in range(problem.num_layers):
        for end in range(first + 1, problem.num_layers + 1):
            solved = solver.solve(first, end, ((in_flight,),), budget)
            bound = table[first, end - first]
            assert bound <= (np.inf if solved is None else solved.objective_s * (1 + 1e-9))
            if solved is not None:
                assert solved.memory_bytes <= budget
    assert np.all(np.isinf(table[:, 0]))
    assert np.all(np.isinf(table[-1]))


@pytest.mark.parametrize("seed", range(0, 48, 4))
@pytest.mark.parametrize("budget", range(30, 100, 10))
def test_a_cell_of_a_capped_solver_is_bounded_over_all_thresholds(seed, budget, monkeypatch):
    """Plans of every other threshold twice as slow as what is proven of them: a cap at its worst.
    Problems whose seed 4 divides have transients."""
    problem, asked = random_problem(seed), []

    def capped(run_problem, node_cap, incumbent_s):
        found = solve_runs(run_problem, node_cap=node_cap, incumbent_s=incumbent_s)
        asked.append(0)
        if not isinstance(found, RunPlan) or len(asked) % 2:
            return found
        return replace(found, time_s=2 * found.time_s, gap=1.0)

    best = StageSolver(problem).solve(0, problem.num_layers, ((1,),), budget)
    monkeypatch.setattr(solved_stages, "solve_runs", capped)
    solved = StageSolver(problem).solve(0, problem.num_layers, ((1,),), budget)
    assert (solved is None) == (best is None)
    if solved is not None:
        assert solved.lower_s <= best.objective_s * (1 + 1e-9)


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
        found = relaxed_s(problem, objectives, ((2,),), budget, 7)[0, 7]
        assert found == pytest.approx(expected, rel=1e-12)


def test_groups_cover_all_transients():
    draws = np.random.default_rng(1)
    layers = [layer_costs("a", draws, 40, transient=12)]
    groups = transient_groups(layers)
    for value in layers[0].transient_bytes.tolist():
        assert any(least <= value <= largest for largest, least in groups)
