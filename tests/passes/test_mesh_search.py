"""Best-first search against solving every candidate."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfold.cost_models.pipeline.makespan import even_makespan_s
from meshfold.cost_models.pipeline.schedules import Schedule, ScheduleKind
from meshfold.errors import InfeasibleError
from meshfold.passes.mesh_degrees import Divides, Multiply, legal_degrees
from meshfold.passes.pipeline.best_first import BoundRule, Solution, best_first


@st.composite
def searches(draw):
    """True steps with two tiers of bounds below them; None is a candidate that does not fit."""
    steps = draw(st.lists(st.one_of(st.none(), st.integers(4, 20)), min_size=1, max_size=12))
    loose, tight, slack = [], [], []
    for step in steps:
        true = 30 if step is None else step
        tight.append(draw(st.one_of(st.integers(0, true), st.just(true))))
        loose.append(draw(st.integers(0, tight[-1])))
        slack.append(draw(st.sampled_from([0, 0, 1, 2])))
    return steps, loose, tight, slack


def run(steps, loose, tight, slack=None, order=None, **options):
    order = list(range(len(steps))) if order is None else order
    solved = []

    def solve(index, limit_s):
        at = order[index]
        solved.append(at)
        if steps[at] is None:
            return None
        slow = 0 if slack is None else slack[at]
        return Solution(float(steps[at] + slow), float(steps[at]), f"plan {at}")

    rules = [BoundRule("tight", lambda index: tight[order[index]])]
    bounds = ("loose", [loose[at] for at in order])
    candidates = [(at, 1) for at in order]
    return best_first(candidates, bounds, solve, refine=rules, **options), solved


@settings(max_examples=300)
@given(searches())
def test_brute_force(search):
    steps, loose, tight, _ = search
    possible = [step for step in steps if step is not None]
    if not possible:
        with pytest.raises(InfeasibleError, match=f"none of {len(steps)} choices"):
            run(steps, loose, tight)
        return
    result, solved = run(steps, loose, tight)
    assert result.solution.step_s == min(possible) == result.lower_bound_s
    assert steps[result.candidate[0]] == min(possible)
    stats = result.stats
    assert stats.num_solved == len(solved) == len(set(solved))
    assert stats.num_candidates == stats.num_solved + sum(stats.pruned.values())


@settings(max_examples=100)
@given(searches(), st.sampled_from([0.0, 0.1]))
def test_certificate_with_solutions_that_have_gaps(search, tolerance):
    steps, loose, tight, slack = search
    possible = [step for step in steps if step is not None]
    if not possible:
        return
    result, _ = run(steps, loose, tight, slack, tolerance=tolerance)
    assert result.lower_bound_s <= min(possible)
    assert 0 <= result.solution.step_s / min(possible) - 1 <= result.gap + 1e-12


@settings(max_examples=100)
@given(searches(), st.randoms(use_true_random=False))
def test_shuffled_candidates_give_the_same_plan(search, random):
    steps, loose, tight, slack = search
    if all(step is None for step in steps):
        return
    order = list(range(len(steps)))
    random.shuffle(order)
    result, solved = run(steps, loose, tight, slack)
    again, solved_again = run(steps, loose, tight, slack, order)
    assert result == again and solved == solved_again


def test_good_bounds_solve_one_candidate():
    result, solved = run([9, 7, 8], [1, 1, 1], [9, 7, 8])
    assert solved == [1]
    assert result.stats.pruned == {"loose": 0, "tight": 2}


def test_candidates_out_of_reach_are_never_refined():
    result, solved = run([9, 7, 8], [9, 7, 8], [9, 7, 8])
    assert solved == [1] and result.stats.pruned == {"loose": 2, "tight": 0}


def test_all_meshes_of_a_cluster():
    """Even stages with a bubble and a collective per tensor-parallel rank, every mesh compared."""
    degrees = legal_degrees(
        {"tp": None, "pp": None, "dp": None, "m": (4, 8, 12)},
        [Multiply(("tp", "pp", "dp"), 60), Divides(("tp",), (30,))],
    )
    tp, pp, dp, m = (degrees.column(name) for name in degrees.names)
    work_s = 600 / (tp * pp * dp * m) * (1 + 0.1 * np.log2(tp)) + 0.01 * dp

    def solve(index, limit_s):
        schedule = Schedule(ScheduleKind.ONE_F_ONE_B, int(pp[index]), int(m[index]))
        step_s = even_makespan_s(schedule, work_s[index] / 3, 2 * work_s[index] / 3)
        return Solution(step_s, step_s, None)

    candidates = [tuple(row) for row in degrees.values.tolist()]
    everything = [solve(index, np.inf).step_s for index in range(len(candidates))]
    result = best_first(candidates, ("no bubble", work_s * m), solve)
    assert result.solution.step_s == min(everything)
    assert result.stats.num_solved < len(candidates)


def test_bounds_of_another_length():
    with pytest.raises(ValueError, match="2 candidates"):
        best_first([(1,), (2,)], ("rule", [1.0]), lambda index, limit_s: None)
