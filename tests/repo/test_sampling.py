"""Samples of matrices of cases: what every value of a parameter meets."""

from collections import Counter
from itertools import combinations, product

import pytest
from support.sampling import Case, sample

SIZES = {"family": 6, "pins": 13, "mode": 2, "parts": 3}


def matrix(*names: str) -> list[Case]:
    values = [[f"{name} {k}" for k in range(SIZES[name])] for name in names]
    return [dict(zip(names, row, strict=True)) for row in product(*values)]


@pytest.mark.parametrize("times", [1, 2, 3])
def test_of_two_parameters_every_value_is_there_as_often_as_asked(times: int) -> None:
    cases = matrix("family", "pins")
    chosen = [cases[k] for k in sample(cases, times)]
    counts = Counter(value for case in chosen for value in case.items())
    assert len(counts) == 19 and min(counts.values()) >= times
    assert 13 * times <= len(chosen) <= 13 * times + 3


def test_of_more_parameters_every_two_values_meet() -> None:
    cases = matrix("family", "pins", "mode", "parts")
    chosen = [cases[k] for k in sample(cases, 2)]
    pairs = {pair for case in chosen for pair in combinations(sorted(case.items()), 2)}
    assert pairs == {pair for case in cases for pair in combinations(sorted(case.items()), 2)}
    assert len(chosen) < len(cases) / 4


def test_what_is_kept_counts_and_what_is_rare_is_taken_whole() -> None:
    cases = [{"family": "a", "pins": 1}, {"family": "a", "pins": 2}, {"family": "b", "pins": 2}]
    assert sample(cases, 2, kept=[1]) == {0, 1, 2}
    assert sample(cases, 1, kept=[1]) == {0, 1, 2}
    assert sample(cases, 1, kept=[0, 2]) == {0, 2}
    assert sample(cases[:1], 3) == {0}
