"""Rates of a step, by hand."""

import pytest

from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.throughput import Throughput


def test_rates_by_hand() -> None:
    """Two nodes of 8 H100: 989.4e12 dense flops a second each in bfloat16, 67e12 in float32."""
    cluster = resolve_cluster("dgx-h100x2")
    for dtype, peak in (("bfloat16", 989.4e12), ("float32", 67e12), ("int8", 67e12)):
        found = Throughput.of(0.5, cluster, flops=4e15, dtype=dtype, samples=32, tokens=65536)
        assert (found.samples_per_s, found.tokens_per_s) == (64, 131072)
        assert found.tflops_per_device == pytest.approx(4e15 / 0.5 / 16 / 1e12)
        assert found.mfu == pytest.approx(4e15 / 0.5 / (16 * peak))


def test_the_peak_is_the_sum_over_devices_that_differ() -> None:
    fast, slow = (resolve_cluster(name) for name in ("dgx-h100", "dgx-a100-80"))
    mixed = ClusterSpec("mixed", (*fast.groups, *slow.groups), fast.network)
    found = Throughput.of(1.0, mixed, flops=1e15, dtype="bfloat16", samples=1, tokens=0)
    assert found.mfu == pytest.approx(1e15 / (8 * 989.4e12 + 8 * 312e12))
    assert found.tokens_per_s == 0
