import numpy as np
import pytest
from hypothesis import given
from support.search.runs import brute_force_s, run_problems

from meshfold.passes.run.chain import best_relaxation, close_conversions, prepare, price_walk
from meshfold.passes.run.problem import LayerType, Run, RunProblem


def test_conversions_close_under_composition_in_both_directions() -> None:
    given_s = np.array([[5.0, 1.0, 9.0], [8.0, 0.0, 2.0], [1.0, 7.0, 0.0]])
    assert close_conversions(given_s).tolist() == [[0, 1, 3], [3, 0, 2], [1, 2, 0]]


def test_preparation_orders_by_name_and_drops_what_is_beaten_in_its_layout() -> None:
    layer = LayerType(
        "t",
        ("d", "c", "b", "a"),
        np.array([1.0, 2.0, 2.0, 3.0]),
        np.array([5, 6, 5, 4]),
        np.array([0, 0, 1, 0]),
    )
    chain = prepare(RunProblem((Run(layer, 3),), 100, 10, np.ones((2, 2))))
    table = chain.table(0)
    assert [layer.strategies[i] for i in table.strategies] == ["a", "b", "d"]
    assert table.layouts.tolist() == [0, 1, 0]
    assert chain.budget_bytes == 18  # no more than all layers can use


def test_layouts_that_convert_for_nothing_both_ways_are_one() -> None:
    layer = LayerType("t", ("a", "b", "c"), np.ones(3), np.arange(3), np.array([0, 1, 2], np.int64))
    conversion_s = np.array([[0.0, 0, 4], [0, 0, 4], [0, 4, 0]])
    chain = prepare(RunProblem((Run(layer, 1),), 9, 0, conversion_s))
    # Layout 2 reaches 0 for nothing but not the other way round, so it stays apart.
    assert chain.conversion_s.tolist() == [[0, 4], [0, 0]]
    assert chain.table(0).layouts.tolist() == [0, 1]


@given(problem=run_problems())
def test_every_price_bounds_from_below_and_none_bounds_higher(problem: RunProblem) -> None:
    if problem.budget_bytes is not None and problem.least_bytes > problem.budget_bytes:
        return
    chain = prepare(problem)
    exact_s = brute_force_s(problem)
    best = best_relaxation(chain)
    assert best.dual_s <= exact_s + 1e-9
    for price in (0.0, 0.05, 0.3, 1.0, 5.0):
        assert price_walk(chain, price).dual_s <= best.dual_s + 1e-9


def test_walk_at_a_price_is_a_plan_of_that_time_and_memory() -> None:
    layer = LayerType("t", ("a", "b"), np.array([1.0, 3.0]), np.array([10, 2]), np.array([0, 1]))
    ends = LayerType("e", ("x",), np.array([1.0]), np.array([0]), np.array([0]))
    runs = (Run(ends, 1), Run(layer, 5), Run(ends, 1))
    chain = prepare(RunProblem(runs, 49, 0, np.array([[0.0, 0.5], [0.25, 0.0]])))
    free, dear = price_walk(chain, 0.0), price_walk(chain, 10.0)
    assert (free.time_s, free.memory_bytes) == (7.0, 50)
    assert dear.time_s == pytest.approx(2 + 15 + 0.75)
    assert dear.memory_bytes == 10
