"""Conditioning and mini-buckets against elimination."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.search.elimination import eliminate

from meshfold.passes.region.conditioning import conditioned
from meshfold.passes.region.elimination import Factor

Problem = tuple[list[int], list[Factor]]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Some entries are infinite, none where every variable is 0."""
    domains = draw(st.lists(st.integers(1, 4), min_size=1, max_size=7))
    variables = st.sampled_from(range(len(domains)))
    scopes = draw(st.lists(st.lists(variables, max_size=3, unique=True), max_size=12))
    cost = st.one_of(st.integers(0, 9), st.just(math.inf))
    factors = []
    for scope in scopes:
        shape = [domains[v] for v in scope]
        entries = draw(st.lists(cost, min_size=math.prod(shape), max_size=math.prod(shape)))
        entries[0] = draw(st.integers(0, 9))
        factors.append(Factor(tuple(scope), np.array(entries, dtype=float).reshape(shape)))
    return domains, factors


def total_of(factors: Sequence[Factor], values: Sequence[int]) -> float:
    return sum(float(f.table[tuple(values[v] for v in f.variables)]) for f in factors)


@given(problems(), st.sampled_from([1, 3, 8, 30, 1 << 20]))
def test_the_best_sum_is_between_what_is_found_and_its_bound(
    problem: Problem, most_entries: int
) -> None:
    domains, factors = problem
    best = float(eliminate(domains, factors).table)
    found = conditioned(domains, factors, dict.fromkeys(range(len(domains)), 0), most_entries)
    assert found is not None, "every variable at 0 is possible"
    assert found.total == pytest.approx(total_of(factors, found.values))
    assert found.lower <= best + 1e-9
    assert best <= found.total + 1e-9
    if most_entries == 1 << 20:
        assert found.total == pytest.approx(best)
        assert found.lower == pytest.approx(best)


def test_what_is_impossible_has_no_assignment() -> None:
    never = Factor((0,), np.array([math.inf, math.inf]))
    assert conditioned([2], [never], {}) is None


def test_a_clique_that_elimination_cannot_join() -> None:
    """24 variables of 6 values, each beside every other: 6^24 entries in one table. What is found
    is better than the start, and no other value of one variable is better still."""
    size, rng = 24, np.random.default_rng(0)
    factors = [Factor((a, b), rng.random((6, 6))) for a in range(size) for b in range(a + 1, size)]
    start = dict.fromkeys(range(size), 5)
    found = conditioned([6] * size, factors, start)
    assert found is not None
    assert found.lower <= found.total < total_of(factors, list(start.values()))
    for v in range(size):
        for value in range(6):
            other = (*found.values[:v], value, *found.values[v + 1 :])
            assert total_of(factors, other) >= found.total - 1e-9
