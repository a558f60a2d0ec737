"""From a profile to a cluster that a file holds and plans are priced with."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.programs.profiles import example_profile

from meshfold.cost_models.calibration.fitted_cluster import LINK, NETWORK, fitted
from meshfold.cost_models.calibration.points import KernelPoint
from meshfold.plan_file.cluster_file import load_cluster, save_cluster


def test_the_products_of_peaks_and_efficiencies_are_what_was_fitted() -> None:
    profile = example_profile()
    found = fitted(profile, "mine", "a test")
    (group,) = found.cluster.groups
    device = group.device
    assert (found.cluster.name, group.num_nodes, group.devices_per_node) == ("mine", 1, 2)
    for dtype, rate in found.rates.flops_per_s.items():
        assert device.peak_flops_per_s[dtype] * device.matmul_efficiency == pytest.approx(rate)
    attention = device.peak_flops_per_s["float32"] * device.attention_efficiency
    assert attention == pytest.approx(found.rates.attention_flops_per_s["float32"])
    assert device.attention_backward_efficiency == device.attention_efficiency
    assert device.host_op_s == 0
    bandwidth = device.memory_bytes_per_s * device.memory_efficiency
    assert bandwidth == pytest.approx(found.rates.memory_bytes_per_s)
    assert (device.memory_bytes, device.reserve_bytes) == (8 * 10**9, 10**9)
    assert device.overlap_slowdown == 1.5
    assert device.source == "a test; fitted to 5 points, rms error 0%"
    assert group.link.name == LINK and group.link.source.startswith("a test; fitted to 4 points")
    assert set(found.residuals) == {
        "launch",
        "memory",
        "gemm",
        "attention",
        "all_reduce",
        "all_gather",
    }


def test_a_host_that_issues_to_a_device_takes_its_time_per_op() -> None:
    profile = example_profile()
    chain = KernelPoint("launch", "float32", 32, 0, 0, 64.0, 4e-4)
    on_device = replace(
        profile,
        machine=replace(profile.machine, backend="nccl"),
        kernels={**profile.kernels, "starts/backward": chain},
    )
    (group,) = fitted(on_device, "mine", "a test").cluster.groups
    assert group.device.host_op_s == pytest.approx(4e-4 / 32)


def test_a_fit_above_every_measured_rate_has_no_efficiency_above_1() -> None:
    profile = example_profile()
    # Its start takes most of the time of the one product: the rest is faster than that was.
    small = KernelPoint("gemm", "float32", 1, 1e6, 0.0, 1e3, 6e-6)
    kernels = {**profile.kernels, "product": small}
    (group,) = fitted(replace(profile, kernels=kernels), "mine", "a test").cluster.groups
    assert group.device.matmul_efficiency <= 1
    assert group.device.peak_flops_per_s["float32"] > small.rate_per_s


def test_processes_on_two_nodes_measure_the_network() -> None:
    found = fitted(example_profile(num_nodes=2), "mine", "a test").cluster
    (group,) = found.groups
    assert (group.num_nodes, group.devices_per_node) == (2, 1)
    assert found.network.name == NETWORK and "fitted to 4 points" in found.network.source
    assert group.link.source.startswith("not measured")


def test_one_process_alone_has_no_links() -> None:
    profile = replace(example_profile(), collectives={}, contention=None)
    machine = replace(profile.machine, processes=1, per_node=1)
    found = fitted(replace(profile, machine=machine), "mine", "a test").cluster
    assert found.num_devices == 1
    assert found.network.source.startswith("not measured")


def test_a_file_holds_it(tmp_path: Path) -> None:
    found = fitted(example_profile(), "mine", "a test").cluster
    save_cluster(found, tmp_path / "mine.json")
    assert load_cluster(tmp_path / "mine.json") == found


def test_a_piece_of_a_model_in_a_dtype_without_rates_says_nothing() -> None:
    profile = example_profile()
    block = KernelPoint("block", "bfloat16", 9, 1e9, 1e8, 1e6, 1e-2)
    more = replace(profile, kernels={**profile.kernels, "half": block})
    assert fitted(more, "mine", "a test") == fitted(profile, "mine", "a test")
