"""The slowest of n devices, by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfold.cost_models.op_costs.stragglers import slowest_factor


@pytest.mark.parametrize(
    ("num_devices", "spread", "expected"),
    [
        (1, 0.01, 1.0),
        (1000, 0.0, 1.0),
        # ln 8 = 2.0794, the root of twice that 2.0393
        (8, 0.01, 1.020393),
        # ln 2048 = 7.6246, 3.9050
        (2048, 0.01, 1.039050),
    ],
)
def test_by_hand(num_devices: int, spread: float, expected: float) -> None:
    assert slowest_factor(num_devices, spread) == pytest.approx(expected, abs=1e-6)


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.floats(0, 0.25))
def test_more_devices_are_never_faster(first: int, second: int, spread: float) -> None:
    low, high = sorted((first, second))
    assert 1 <= slowest_factor(low, spread) <= slowest_factor(high, spread)


def test_it_bounds_the_mean_of_the_largest_of_two() -> None:
    # The larger of two standard normal numbers is 1 / sqrt(pi) on average.
    assert slowest_factor(2, 0.1) >= 1 + 0.1 / math.sqrt(math.pi)
