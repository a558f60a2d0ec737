"""What a ClusterSpec refuses, and the field path it names."""

from dataclasses import replace
from typing import Any

import pytest

from meshfold.cost_models.hardware.devices import cluster
from meshfold.errors import ClusterSpecError
from meshfold.ir.cluster import ClusterSpec, LinkSpec, NodeGroup

GOOD = cluster("dgx-h100x2")
GROUP = GOOD.groups[0]


def with_device(**changes: Any) -> ClusterSpec:
    return with_group(device=replace(GROUP.device, **changes))


def with_group(**changes: Any) -> ClusterSpec:
    return ClusterSpec("c", (GROUP, replace(GROUP, **changes)), GOOD.network)


def with_network(**changes: Any) -> ClusterSpec:
    return replace(GOOD, network=replace(GOOD.network, **changes))


CASES: list[tuple[Any, str]] = [
    (lambda: replace(GOOD, groups=()), "groups: a cluster needs at least one node group"),
    (lambda: replace(GOOD, name=" "), "name: must not be empty"),
    (lambda: with_group(num_nodes=0), "groups[1].num_nodes: must be 1 or more, got 0"),
    (lambda: with_group(devices_per_node=-8), "groups[1].devices_per_node: must be 1 or more"),
    (lambda: with_device(name=""), "groups[1].device.name: must not be empty"),
    (lambda: with_device(source=""), "groups[1].device.source: must not be empty"),
    (lambda: with_device(memory_bytes=0), "groups[1].device.memory_bytes: must be 1 or more"),
    (lambda: with_device(memory_bytes_per_s=0), "groups[1].device.memory_bytes_per_s: must be pos"),
    (lambda: with_device(matmul_efficiency=1.5), "groups[1].device.matmul_efficiency: must be abo"),
    (lambda: with_device(memory_efficiency=0), "groups[1].device.memory_efficiency: must be above"),
    (lambda: with_device(launch_s=-1), "groups[1].device.launch_s: must be 0 or more, got -1"),
    (lambda: with_device(launch_s=float("nan")), "groups[1].device.launch_s: must be 0 or more"),
    (lambda: with_device(reserve_bytes=-1), "groups[1].device.reserve_bytes: must be 0 or more"),
    (lambda: with_device(reserve_bytes=2**40), "groups[1].device.reserve_bytes: 1099511627776 lea"),
    (lambda: with_device(host_bytes_per_s=-1), "groups[1].device.host_bytes_per_s: must be 0 or"),
    (lambda: with_device(overlap_slowdown=0.9), "groups[1].device.overlap_slowdown: must be from"),
    (lambda: with_device(speed_spread=-0.1), "groups[1].device.speed_spread: must be from 0 (all"),
    (lambda: with_device(speed_spread=0.3), "groups[1].device.speed_spread: must be from 0 (all"),
    (lambda: with_device(overlap_slowdown=2.1), "groups[1].device.overlap_slowdown: must be from"),
    (
        lambda: with_device(peak_flops_per_s={"float16": 1.0}),
        "groups[1].device.peak_flops_per_s: the float32 figure is missing",
    ),
    (
        lambda: with_device(peak_flops_per_s={"float32": 1.0, "float16": -1.0}),
        "groups[1].device.peak_flops_per_s.float16: must be positive, got -1.0",
    ),
    (
        lambda: with_group(link=replace(GROUP.link, name=GOOD.network.name)),
        "groups[1].link.name: 'ndr-ib' is also the network's name",
    ),
    (lambda: with_network(bytes_per_s=0), "network.bytes_per_s: must be positive, got 0"),
    (lambda: with_network(bytes_per_s=1e-30), "network.bytes_per_s: must be from 1 to 1e+20 per"),
    (lambda: with_network(bytes_per_s=1e30), "network.bytes_per_s: must be from 1 to 1e+20 per"),
    (lambda: with_network(latency_s=1e30), "network.latency_s: must be at most 3600 seconds"),
    (lambda: with_network(start_s=3601), "network.start_s: must be at most 3600 seconds"),
    (lambda: with_device(host_op_s=1e30), "groups[1].device.host_op_s: must be at most 3600 sec"),
    (lambda: with_device(disk_bytes_per_s=0.1), "groups[1].device.disk_bytes_per_s: must be from "),
    (
        lambda: with_device(matmul_efficiency=1e-30),
        "groups[1].device.matmul_efficiency: must be at least 1e-06, got 1e-30",
    ),
    (lambda: with_network(latency_s=-1), "network.latency_s: must be 0 or more, got -1"),
    (lambda: with_network(start_s=-1), "network.start_s: must be 0 or more"),
    (lambda: with_network(ramp_bytes=-1), "network.ramp_bytes: must be 0 or more"),
    (lambda: with_network(congestion=-1), "network.congestion: must be 0 or more, got -1"),
    (lambda: with_network(rank_s=-1), "network.rank_s: must be 0 or more, got -1"),
    (lambda: with_network(reduce_bytes_per_s=-1), "network.reduce_bytes_per_s: must be 0 or more"),
    (
        lambda: with_network(bytes_per_s_by_ranks=((2, 1.0), (2, 1.0))),
        "network.bytes_per_s_by_ranks[1]: ranks must rise and start at 2, got 2",
    ),
    (
        lambda: with_network(bytes_per_s_by_ranks=((2, 0.0),)),
        "network.bytes_per_s_by_ranks[0]: must be positive, got 0.0",
    ),
]


@pytest.mark.parametrize(("build", "message"), CASES, ids=[m[:45] for _, m in CASES])
def test_the_wrong_field_is_named(build: Any, message: str) -> None:
    with pytest.raises(ClusterSpecError) as caught:
        build()
    assert str(caught.value).startswith(message)


def test_counts() -> None:
    assert (GOOD.num_nodes, GOOD.num_devices, GROUP.num_devices) == (2, 16, 16)
    assert GOOD.memory_bytes == GROUP.device.memory_bytes


def test_links_need_no_more_than_rate_and_latency() -> None:
    link = LinkSpec("wire", 1.0, 0.0, "test")
    group = NodeGroup(GROUP.device, 1, 1, link)
    assert ClusterSpec("c", (group,), GOOD.network).num_devices == 1


def test_a_plan_may_use_all_but_a_margin_of_the_smallest_device() -> None:
    smaller = with_device(memory_bytes=40 * 10**9)
    assert smaller.budget_bytes == 38 * 10**9
    assert GOOD.budget_bytes == int(0.95 * GROUP.device.memory_bytes)


def test_a_dtype_without_a_peak_has_float32s() -> None:
    assert GROUP.device.peak("float8") == GROUP.device.peak("float32") == 67e12
