import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_runs import brute_force_parts, part_lists

from meshfold.passes.run import core as run_core
from meshfold.passes.run.core import MaxOfForms, Part
from meshfold.passes.run_forms import best_support, solve_forms

CELLS = st.integers(0, 4)
FORMS = st.lists(st.tuples(CELLS, CELLS, st.integers(0, 40)), min_size=1, max_size=4)


def objective_of(forms: list[tuple[int, int, int]]) -> MaxOfForms:
    rows = tuple((float(a), float(b)) for a, b, _ in forms)
    return MaxOfForms(rows, tuple(float(c) for _, _, c in forms))


@settings(max_examples=200)
@given(case=part_lists(2), forms=FORMS, listed=st.sampled_from([1, 400]))
def test_plan_is_the_best_of_all(
    case: tuple[list[Part], int], forms: list[tuple[int, int, int]], listed: int
) -> None:
    parts, budget = case
    objective = objective_of(forms)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_core, "MOST_LISTED", listed)
        result = solve_forms(parts, objective, budget, node_cap=10**6)
    best_s = brute_force_parts(parts, objective, budget)
    assert result.plan is not None
    assert result.plan.value_s == pytest.approx(best_s, rel=1e-12)
    assert result.dual_s <= best_s * (1 + 1e-12)
    measures = sum(
        part.measures @ column for part, column in zip(parts, result.plan.counts, strict=True)
    )
    assert objective.value(measures) == pytest.approx(result.plan.value_s, rel=1e-12)
    assert result.plan.memory_bytes <= budget


def test_mix_of_two_forms_bounds_higher_than_either() -> None:
    # One strategy is fast in the first measure, the other in the second: 4 + 4 is best, at 20.
    part = Part(8, np.array([[1.0, 4.0], [4.0, 1.0]]), np.array([1, 1]))
    objective = MaxOfForms(((1.0, 0.0), (0.0, 1.0)), (0.0, 0.0))
    support = best_support([part], objective, 8)
    assert support.bound_s([part], 8) == pytest.approx(20.0)
    assert support.weights.tolist() == pytest.approx([0.5, 0.5])
    result = solve_forms([part], objective, 8, node_cap=1000)
    assert result.plan is not None and result.plan.value_s == 20.0
    assert result.plan.counts[0].tolist() == [4, 4]


def test_hidden_reduction_counts_once_it_is_exposed() -> None:
    # z = (microbatch, with reduction); T = max(m z0, (m - 1) z0 + z1), m = 4.
    part = Part(2, np.array([[1.0, 1.5], [9.0, 1.5]]), np.array([5, 5]))
    objective = MaxOfForms(((4.0, 0.0), (3.0, 1.0)), (0.0, 0.0))
    result = solve_forms([part], objective, 10, node_cap=1000)
    assert result.plan is not None
    assert result.plan.counts[0].tolist() == [0, 2]
    assert result.plan.value_s == 12.0
