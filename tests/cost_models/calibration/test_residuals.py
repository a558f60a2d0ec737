"""Residuals by hand."""

import pytest

from meshfold.cost_models.calibration.residuals import residual


def test_by_hand() -> None:
    found = residual({"a": 0.1, "b": -0.7, "c": 0.1})
    assert (found.num_points, found.median) == (3, 0.1)
    assert (found.worst, found.worst_name) == (-0.7, "b")
    assert found.rms == pytest.approx(((0.01 + 0.49 + 0.01) / 3) ** 0.5)
