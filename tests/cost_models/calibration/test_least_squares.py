"""The solver against formulas whose factors are known."""

from collections.abc import Sequence

import pytest

from meshfold.cost_models.calibration.least_squares import positive


def test_positive_factors_of_a_formula() -> None:
    at = [1.0, 2.0, 5.0, 20.0]
    seconds = [3e-3 + x / 4e5 for x in at]

    def errors(factors: Sequence[float]) -> list[float]:
        start, rate = factors
        return [(start + x / rate) / s - 1 for x, s in zip(at, seconds, strict=True)]

    assert positive(errors, [1.0, 1.0]) == pytest.approx([3e-3, 4e5], rel=1e-3)


def test_a_factor_without_effect_stays_where_it_is() -> None:
    found = positive(lambda f: [f[0] / 7 - 1], [1.0, 5.0])
    assert found == pytest.approx([7.0, 5.0], rel=1e-4)


def test_a_factor_that_hardly_shows_does_not_run_away() -> None:
    def errors(factors: Sequence[float]) -> list[float]:
        start, rate = factors
        return [(start + x / rate) / 1e-3 - 1 for x in (1.0, 2.0, 3.0)]

    free, held = (positive(errors, [5e-4, 1e5], pull)[1] for pull in (0.0, 0.02))
    assert free > 1e7 > held > 1e5


def test_the_least_errors_where_none_is_zero() -> None:
    # The mean of 1, 2 and 6.
    found = positive(lambda f: [f[0] - 1, f[0] - 2, f[0] - 6], [10.0])
    assert found == pytest.approx([3.0], rel=1e-4)
