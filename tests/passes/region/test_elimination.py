"""(min,+) elimination against brute force over all assignments."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.search.elimination import eliminate

from meshfold.passes.region.elimination import (
    EliminationPlan,
    EliminationPlans,
    Factor,
    min_fill_order,
)


def brute_force(domains, factors, keep):
    """T over `keep` by enumeration."""
    table = np.full([domains[v] for v in keep], np.inf)
    for values in itertools.product(*map(range, domains)):
        cost = sum(f.table[tuple(values[v] for v in f.variables)] for f in factors)
        at = tuple(values[v] for v in keep)
        table[at] = min(table[at], cost)
    return table


@st.composite
def factor_graphs(draw):
    domains = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    variables = range(len(domains))
    scopes = draw(
        st.lists(st.lists(st.sampled_from(variables), max_size=3, unique=True), max_size=8)
    )
    cost = st.one_of(st.integers(0, 9), st.just(math.inf))
    factors = []
    for scope in scopes:
        shape = [domains[v] for v in scope]
        entries = draw(st.lists(cost, min_size=math.prod(shape), max_size=math.prod(shape)))
        factors.append(Factor(tuple(scope), np.array(entries, dtype=float).reshape(shape)))
    keep = draw(st.lists(st.sampled_from(variables), max_size=2, unique=True))
    return domains, factors, tuple(keep)


@settings(max_examples=200, deadline=None)
@given(factor_graphs())
def test_equals_brute_force(graph):
    domains, factors, keep = graph
    result = eliminate(domains, factors, keep)
    expected = brute_force(domains, factors, keep)
    np.testing.assert_allclose(result.table, expected)
    for at in itertools.product(*(range(domains[v]) for v in keep)):
        values = result.assignment(at)
        assert tuple(values[v] for v in keep) == at
        cost = sum(f.table[tuple(values[v] for v in f.variables)] for f in factors)
        assert cost == pytest.approx(expected[at])


@settings(max_examples=100, deadline=None)
@given(factor_graphs(), st.integers(0, 2**32 - 1))
def test_one_plan_serves_all_tables_over_its_scopes(graph, seed):
    domains, factors, keep = graph
    plan = EliminationPlan(domains, [f.variables for f in factors], keep)
    plan.run([f.table for f in factors])
    rng = np.random.default_rng(seed)
    others = [Factor(f.variables, rng.random(f.table.shape)) for f in factors]
    found, alone = plan.run([f.table for f in others]), eliminate(domains, others, keep)
    assert found.table.tolist() == alone.table.tolist()
    assert found.assignment() == alone.assignment()
    assert (found.width, found.largest_table) == (alone.width, alone.largest_table)


def test_plans_are_made_once_and_a_case_is_eliminated_as_it_is_alone():
    plans = EliminationPlans()
    scopes = [(0, 1), (1, 2), (2,)]
    assert plans.of([3, 4, 2], scopes) is plans.of((3, 4, 2), tuple(scopes))
    assert plans.of([3, 4, 2], scopes) is not plans.of([3, 4, 5], scopes)
    rng = np.random.default_rng(0)
    tables = [rng.random((6, 3, 4)), rng.random((6, 4, 2)), rng.random((6, 2))]
    together = plans.of([3, 4, 2, 6], [(3, *scope) for scope in scopes], 3).run(tables)
    for case in range(6):
        alone = plans.of([3, 4, 2], scopes).run([table[case] for table in tables])
        assert float(together.table[case]) == float(alone.table)
        assert together.assignment((case,))[:3] == alone.assignment()
    assert (together.width, together.largest_table) == (alone.width, alone.largest_table)


def test_best_values_of_uneliminated_variables_by_default():
    costs = np.array([[3.0, 1.0], [0.5, 4.0]])
    result = eliminate([2, 2], [Factor((0, 1), costs)], keep=(1,))
    assert result.table.tolist() == [0.5, 1.0]
    assert result.assignment() == (1, 0)
    assert result.assignment((1,)) == (0, 1)


def test_no_variables_and_no_factors():
    assert eliminate([], []).assignment() == ()
    assert eliminate([3], []).assignment() == (0,)


def test_constant_factor_is_counted():
    result = eliminate([2], [Factor((), np.array(2.0)), Factor((0,), np.array([1.0, 0.0]))])
    assert float(result.table) == 2.0


def test_ties_go_to_the_lower_index():
    result = eliminate([3, 3], [Factor((0, 1), np.zeros((3, 3)))])
    assert result.assignment() == (0, 0)


def test_chain_has_width_one():
    n, d = 30, 5
    rng = np.random.default_rng(0)
    factors = [Factor((k, k + 1), rng.random((d, d))) for k in range(n - 1)]
    result = eliminate([d] * n, factors)
    assert result.width == 1
    assert result.largest_table == d * d


def test_grid_order_is_min_fill():
    # A 2 x 4 ladder has treewidth 2, which min-fill reaches.
    edges = [(k, k + 1) for k in range(3)] + [(k + 4, k + 5) for k in range(3)]
    edges += [(k, k + 4) for k in range(4)]
    rng = np.random.default_rng(1)
    result = eliminate([3] * 8, [Factor(e, rng.random((3, 3))) for e in edges])
    assert result.width == 2


def test_order_leaves_kept_variables_out():
    assert min_fill_order([2, 2, 2], [(0, 1), (1, 2)], keep=(1,)) == [0, 2]


def test_same_input_same_assignment():
    rng = np.random.default_rng(2)
    factors = [
        Factor((k, (k * 7 + 3) % 20), rng.integers(0, 3, (4, 4)).astype(float))
        for k in range(20)
        if k != (k * 7 + 3) % 20
    ]
    assert len({eliminate([4] * 20, factors).assignment() for _ in range(3)}) == 1


@given(factor_graphs())
def test_a_kept_variable_numbers_problems_that_are_solved_as_alone(graph):
    """To the last bit, and as hard as one of them."""
    domains, factors, _ = graph
    order = min_fill_order(domains, [f.variables for f in factors])
    alone = eliminate(domains, factors, order=order)
    scales = (1.0, 0.3, 7.0)
    cases = [
        Factor((len(domains), *f.variables), np.stack([f.table * s for s in scales]))
        for f in factors
    ]
    together = eliminate([*domains, len(scales)], cases, (len(domains),), order)
    assert (together.width, together.largest_table) == (alone.width, alone.largest_table)
    for k, scale in enumerate(scales):
        scaled = [Factor(f.variables, f.table * scale) for f in factors]
        one = eliminate(domains, scaled, order=order)
        if factors:
            assert together.table[k] == one.table
            assert together.assignment((k,))[:-1] == one.assignment()
