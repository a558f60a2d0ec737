"""Points of a profile: rates, shapes of groups, contention."""

import pytest

from meshfold.cost_models.calibration.points import CollectivePoint, ContentionPoint, KernelPoint
from meshfold.cost_models.hardware.topology import GroupShape


def test_the_rate_is_of_flops_where_there_are_some() -> None:
    assert KernelPoint("gemm", "float32", 1, 6.0, 2.0, 100.0, 2.0).rate_per_s == 4.0
    assert KernelPoint("memory", "float32", 1, 0.0, 0.0, 100.0, 2.0).rate_per_s == 50.0


def test_a_collective_has_the_shape_of_its_group() -> None:
    point = CollectivePoint("all_reduce", 8.0, 6, 2, 4, 2, 1.0)
    assert point.shape == GroupShape(6, 2, 4, 2)


@pytest.mark.parametrize(
    ("compute_s", "collective_s", "both_s", "slowdown"),
    [
        (1.0, 1.0, 1.0, 1.0),
        (1.0, 1.0, 1.8, 1.8),
        (1.0, 1.0, 2.5, 2.0),  # noise: worse than one after the other
        (3.0, 1.0, 2.9, 1.0),
        # While both run, 1.5 s, the longer does 1 s of its 3; then 2 s alone.
        (3.0, 1.0, 3.5, 1.5),
        (1.0, 3.0, 3.5, 1.5),
        (0.0, 1.0, 1.0, 1.0),
    ],
)
def test_slowdown(compute_s: float, collective_s: float, both_s: float, slowdown: float) -> None:
    assert ContentionPoint(compute_s, collective_s, both_s).slowdown == pytest.approx(slowdown)
