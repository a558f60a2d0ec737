"""Best-first search against solving every candidate."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.programs.makespans import even_makespan_s

from meshfold.cost_models.pipeline.schedules import Schedule, ScheduleKind
from meshfold.passes.one_pass.tree import divisors
from meshfold.passes.pipeline.best_first import Solution, best_first


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
            return np.inf
        slow = 0 if slack is None else slack[at]
        return Solution(float(steps[at] + slow), float(steps[at]), f"plan {at}")

    rules = [lambda index: tight[order[index]]]
    bounds = [loose[at] for at in order]
    candidates = [(at, 1) for at in order]
    return best_first(candidates, bounds, solve, refine=rules, **options), solved


@settings(max_examples=300)
@given(searches())
def test_brute_force(search):
    steps, loose, tight, _ = search
    possible = [step for step in steps if step is not None]
    if not possible:
        assert run(steps, loose, tight)[0] is None
        return
    result, solved = run(steps, loose, tight)
    assert result.solution.step_s == min(possible) == result.lower_bound_s
    assert len(solved) == len(set(solved))


@settings(max_examples=100)
@given(searches(), st.sampled_from([0.0, 0.1]))
def test_certificate_with_solutions_that_have_gaps(search, tolerance):
    steps, loose, tight, slack = search
    possible = [step for step in steps if step is not None]
    if not possible:
        return
    result, _ = run(steps, loose, tight, slack, tolerance=tolerance)
    assert result.lower_bound_s <= min(possible)
    step_s = result.solution.step_s
    assert min(possible) <= step_s
    assert step_s / min(possible) <= step_s / max(result.lower_bound_s, 1e-300) + 1e-12


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


@settings(max_examples=100)
@given(searches())
def test_a_search_that_finds_nothing_keeps_its_bound(search):
    """Solvers that miss every plan of the best candidates, and prove no more than their bound."""
    steps, loose, tight, slack = search

    def solve(index, limit_s):
        step = steps[index]
        if step is None:
            return np.inf
        if slack[index]:
            return float(tight[index])
        return Solution(float(step), float(step), f"plan {index}")

    if all(step is None or slow for step, slow in zip(steps, slack, strict=True)):
        return
    rules = [lambda index: tight[index]]
    candidates = [(at, 1) for at in range(len(steps))]
    result = best_first(candidates, loose, solve, refine=rules)
    assert result.lower_bound_s <= min(step for step in steps if step is not None)


def test_good_bounds_solve_one_candidate():
    assert run([9, 7, 8], [1, 1, 1], [9, 7, 8])[1] == [1]


def test_candidates_out_of_reach_are_never_refined():
    refined = []
    rules = [lambda index: refined.append(index) or 0.0]
    solution = Solution(7.0, 7.0, "plan")
    best_first([(0,), (1,), (2,)], [9, 7, 8], lambda index, _: solution, refine=rules)
    assert refined == [1]


def test_all_meshes_of_a_cluster():
    """Even stages with a bubble and a collective per tensor-parallel rank, every mesh compared."""
    degrees = [
        (tp, pp, 60 // tp // pp, m)
        for tp in divisors(30)
        for pp in divisors(60 // tp)
        for m in (4, 8, 12)
    ]
    tp, pp, dp, m = np.array(degrees).T
    solved = []
    work_s = 600 / (tp * pp * dp * m) * (1 + 0.1 * np.log2(tp)) + 0.01 * dp

    def solve(index, limit_s):
        solved.append(index)
        schedule = Schedule(ScheduleKind.ONE_F_ONE_B, int(pp[index]), int(m[index]))
        step_s = even_makespan_s(schedule, work_s[index] / 3, 2 * work_s[index] / 3)
        return Solution(step_s, step_s, None)

    everything = [solve(index, np.inf).step_s for index in range(len(degrees))]
    solved.clear()
    result = best_first(degrees, work_s * m, solve)
    assert result.solution.step_s == min(everything)
    assert len(solved) < len(degrees)


def test_bounds_of_another_length():
    with pytest.raises(ValueError, match="2 candidates"):
        best_first([(1,), (2,)], [1.0], lambda index, limit_s: np.inf)
