import numpy as np
import pytest
from galvatron.forms import MaxOfForms, MeasuredLayers, best_mix, solve_forms
from hypothesis import given, settings
from hypothesis import strategies as st
from support.search.runs import group_lists, least_over_counts

CELLS = st.integers(0, 4)
FORMS = st.lists(st.tuples(CELLS, CELLS, st.integers(0, 40)), min_size=1, max_size=4)


def objective_of(forms: list[tuple[int, int, int]]) -> MaxOfForms:
    rows = tuple((float(a), float(b)) for a, b, _ in forms)
    return MaxOfForms(rows, tuple(float(c) for _, _, c in forms))


@settings(max_examples=200)
@given(case=group_lists(2), forms=FORMS)
def test_plan_is_the_best_of_all(
    case: tuple[list[tuple[int, np.ndarray, np.ndarray]], int], forms: list[tuple[int, int, int]]
) -> None:
    groups, budget = case
    layers = [MeasuredLayers(*group) for group in groups]
    objective = objective_of(forms)
    result = solve_forms(layers, objective, budget, node_cap=10**6)
    best_s = least_over_counts(groups, objective.value, budget)
    assert result.plan is not None
    assert result.plan.time_s == pytest.approx(best_s, rel=1e-12)
    assert result.dual_s <= best_s * (1 + 1e-12)
    measures = sum(
        each.measures @ column for each, column in zip(layers, result.plan.counts, strict=True)
    )
    assert objective.value(measures) == pytest.approx(result.plan.time_s, rel=1e-12)
    assert result.plan.memory_bytes <= budget


def test_mix_of_two_forms_bounds_higher_than_either() -> None:
    # One strategy is fast in the first measure, the other in the second: 4 + 4 is best, at 20.
    layers = MeasuredLayers(8, np.array([[1.0, 4.0], [4.0, 1.0]]), np.array([1, 1]))
    objective = MaxOfForms(((1.0, 0.0), (0.0, 1.0)), (0.0, 0.0))
    mix = best_mix([layers], objective, 8)
    assert mix.bound_s(8) == pytest.approx(20.0)
    assert mix.weights.tolist() == pytest.approx([0.5, 0.5])
    result = solve_forms([layers], objective, 8, node_cap=1000)
    assert result.plan is not None and result.plan.time_s == 20.0
    assert result.plan.counts[0].tolist() == [4, 4]


def test_hidden_reduction_counts_once_it_is_exposed() -> None:
    # z = (microbatch, with reduction); T = max(m z0, (m - 1) z0 + z1), m = 4.
    layers = MeasuredLayers(2, np.array([[1.0, 1.5], [9.0, 1.5]]), np.array([5, 5]))
    objective = MaxOfForms(((4.0, 0.0), (3.0, 1.0)), (0.0, 0.0))
    result = solve_forms([layers], objective, 10, node_cap=1000)
    assert result.plan is not None
    assert result.plan.counts[0].tolist() == [0, 2]
    assert result.plan.time_s == 12.0


def test_value_is_the_largest_form() -> None:
    objective = MaxOfForms(((1.0, 0.0), (0.0, 2.0)), (5.0, 0.0))
    assert objective.value(np.array((1.0, 2.0))) == 6.0
    assert objective.value(np.array((1.0, 4.0))) == 8.0
