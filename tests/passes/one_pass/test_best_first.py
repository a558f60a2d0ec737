"""Best-first search against solving every candidate."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.programs.makespans import even_makespan_s

from meshfold.cost_models.pipeline.schedules import Schedule, ScheduleKind
from meshfold.passes.one_pass.best_first import (
    SolvedCandidate,
    TieredCandidate,
    best_first,
)
from meshfold.passes.one_pass.pruning import divisors


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


class Numbered(TieredCandidate):
    """A candidate that is solved as (lower bound, step), step infinite where none is found.
    asked, solved: numbers of those whose bound was raised, and that were solved."""

    def __init__(self, number, loose_s, tight_s, solution, asked, solved):
        super().__init__((number, 1), loose_s, [lambda: asked.append(number) or tight_s])
        self.number, self._solution, self._solved = number, solution, solved

    def solve(self, beat_s):
        self._solved.append(self.number)
        return self.solution(*self._solution)


def run(solutions, loose, tight, order=None, **options):
    """(the result, numbers of the candidates whose bound was raised). order: of the candidates."""
    asked, solved = [], []
    numbers = range(len(solutions)) if order is None else order
    candidates = [Numbered(k, loose[k], tight[k], solutions[k], asked, solved) for k in numbers]
    result = best_first(candidates, **options)
    assert [x.number for x in result.solved] == solved
    assert sorted([*solved, *(x.number for x in result.left)]) == sorted(numbers)
    bounds = [x.bound_s for x in result.left]
    assert bounds == sorted(bounds)
    return result, asked


def solutions_of(steps, slack):
    """(lower bound, step) of each: what is found is slower than what exists by its slack."""
    pairs = zip(steps, slack, strict=True)
    return [(np.inf, np.inf) if step is None else (step, float(step + s)) for step, s in pairs]


@settings(max_examples=300)
@given(searches())
def test_brute_force(search):
    steps, loose, tight, _ = search
    possible = [step for step in steps if step is not None]
    result, _ = run(solutions_of(steps, [0] * len(steps)), loose, tight)
    if not possible:
        assert result.best is None
        return
    assert steps[result.best.number] == min(possible) == result.lower_bound_s


@settings(max_examples=100)
@given(searches(), st.sampled_from([0.0, 0.1]), st.sampled_from([np.inf, 12.0]))
def test_certificate_with_solutions_that_have_gaps(search, tolerance, beat_s):
    steps, loose, tight, slack = search
    possible = [step for step in steps if step is not None]
    if not possible:
        return
    solutions = solutions_of(steps, slack)
    result, _ = run(solutions, loose, tight, tolerance=tolerance, beat_s=beat_s)
    assert result.lower_bound_s <= min(possible)
    step_s = min([beat_s, *(solutions[x.number][1] for x in [result.best] if x)])
    found_s = min([beat_s, *(step_s for _, step_s in solutions)])
    assert min([*possible, beat_s]) <= step_s <= found_s * (1 + tolerance)


@settings(max_examples=100)
@given(searches())
def test_without_pruning_all_that_may_fit_are_solved(search):
    steps, loose, tight, slack = search
    result, _ = run(solutions_of(steps, slack), loose, tight, prunes=False)
    assert len(result.solved) == len(steps)


@settings(max_examples=100)
@given(searches(), st.randoms(use_true_random=False))
def test_shuffled_candidates_give_the_same_plan(search, random):
    steps, loose, tight, slack = search
    order = list(range(len(steps)))
    random.shuffle(order)
    result, asked = run(solutions_of(steps, slack), loose, tight)
    again, asked_again = run(solutions_of(steps, slack), loose, tight, order)
    assert asked == asked_again
    assert [x.number for x in result.solved] == [x.number for x in again.solved]
    if result.best is not None:
        assert again.best.number == result.best.number
    assert again.lower_bound_s == result.lower_bound_s


@settings(max_examples=100)
@given(searches())
def test_a_search_that_finds_nothing_keeps_its_bound(search):
    """Solvers that miss every plan of some candidates, and prove no more than their bound."""
    steps, loose, tight, slack = search
    if all(step is None or slow for step, slow in zip(steps, slack, strict=True)):
        return
    solutions = [
        (np.inf, np.inf)
        if step is None
        else (tight[k], np.inf)
        if slack[k]
        else (step, float(step))
        for k, step in enumerate(steps)
    ]
    result, _ = run(solutions, loose, tight)
    assert result.lower_bound_s <= min(step for step in steps if step is not None)


def test_good_bounds_solve_one_candidate():
    result, _ = run(solutions_of([9, 7, 8], [0, 0, 0]), [1, 1, 1], [9, 7, 8])
    assert [x.number for x in result.solved] == [1]


def test_candidates_out_of_reach_are_never_refined():
    assert run(solutions_of([9, 7, 8], [0, 0, 0]), [9, 7, 8], [9, 7, 8])[1] == [1]


def test_what_is_known_takes_part_and_comes_first_among_equals():
    known = SolvedCandidate(6.0, 7.0)
    other = Numbered(0, 6.5, 6.5, (6.5, 7.0), [], [])
    result = best_first([other, known])
    assert result.best is known and result.solved == (known, other)
    assert result.lower_bound_s == 6.0


def test_all_meshes_of_a_cluster():
    """Even stages with a bubble and a collective per tensor-parallel rank, every mesh compared."""
    degrees = [
        (tp, pp, 60 // tp // pp, m)
        for tp in divisors(30)
        for pp in divisors(60 // tp)
        for m in (4, 8, 12)
    ]
    tp, pp, dp, m = np.array(degrees).T
    work_s = 600 / (tp * pp * dp * m) * (1 + 0.1 * np.log2(tp)) + 0.01 * dp

    def step_s(index):
        schedule = Schedule(ScheduleKind.ONE_F_ONE_B, int(pp[index]), int(m[index]))
        return even_makespan_s(schedule, work_s[index] / 3, 2 * work_s[index] / 3)

    steps = [step_s(index) for index in range(len(degrees))]
    bounds = (work_s * m).tolist()
    result, _ = run([(s, s) for s in steps], bounds, bounds)
    assert steps[result.best.number] == min(steps)
    assert len(result.solved) < len(degrees)
