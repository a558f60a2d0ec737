"""Presets, and what a person may write for a cluster."""

import json
from importlib import resources
from pathlib import Path

import pytest
from support.programs.plans import cluster_text

from meshfold.cost_models.hardware.devices import cluster, presets, resolve_cluster, subset
from meshfold.errors import ClusterSpecError
from meshfold.ir.cluster import OVERLAP_SLOWDOWN, ClusterSpec

HOST_GB_PER_S = {
    "dgx-a100-40": 31,
    "dgx-a100-80": 31,
    "a100-pcie-40": 31,
    "a100-pcie-80": 31,
    "dgx-a800": 31,
    "dgx-h100": 63,
    "h100-96": 63,
    "h100-pcie": 63,
    "dgx-h800": 63,
    "dgx-h200": 63,
    "gh200": 225,
    "dgx-b200": 63,
    "dgx-b300": 121,
    "gb200-nvl72": 112,
    "gb300-nvl72": 112,
    "dgx-v100-16": 15.75,
    "dgx-v100": 15.75,
    "dgx2-v100": 15.75,
    "titan-rtx": 15.75,
    "rtx-3090": 31,
    "rtx-4090": 31,
    "rtx-a6000": 31,
    "a10g": 31,
    "l4": 31,
    "l40s": 31,
    "mi300x": 63,
    "local-cpu": 0,  # its memory is the host's
}
NAMES = list(HOST_GB_PER_S)
PER_NODE = {"local-cpu": 1, "gh200": 4, "dgx2-v100": 16, "gb200-nvl72": 72, "gb300-nvl72": 72}


def test_every_preset_is_a_valid_cluster() -> None:
    assert list(presets()) == NAMES
    for name in NAMES:
        assert cluster(name).num_devices == PER_NODE.get(name, 8)


def test_every_figure_has_a_source() -> None:
    text = (
        resources.files("meshfold.cost_models.hardware").joinpath("presets.json").read_text("utf-8")
    )
    data = json.loads(text)
    for table in ("devices", "links"):
        for name, figures in data[table].items():
            for key, figure in figures.items():
                value, source = figure
                assert len(source) >= 8, f"{table}.{name}.{key}"


@pytest.mark.parametrize("name", NAMES)
def test_the_link_to_the_host_is_that_of_the_host(name: str) -> None:
    assert cluster(name).host_bytes_per_s == HOST_GB_PER_S[name] * 1e9
    assert ("host_gb_per_s" in cluster(name).groups[0].device.source) == (name != "local-cpu")


def test_overlap_takes_cores_where_these_move_the_bytes() -> None:
    assert cluster("local-cpux2").overlap_slowdown == 1.8
    assert "overlap_slowdown: fitted" in cluster("local-cpu").groups[0].device.source
    assert cluster("dgx-h100").overlap_slowdown == OVERLAP_SLOWDOWN


def test_figures_are_converted_where_they_are_read() -> None:
    h100 = cluster("dgx-h100").groups[0]
    assert h100.device.memory_bytes == 80 * 2**30
    assert h100.device.memory_bytes_per_s == 3350e9
    assert h100.device.peak_flops_per_s["bfloat16"] == 989.4e12
    assert h100.device.launch_s == 3e-6
    assert h100.device.host_op_s == 8e-6
    assert h100.link.bytes_per_s == 370e9
    assert h100.link.latency_s == 1.9e-6
    assert "MAMF" in h100.device.source and "dgxc-benchmarking" in h100.link.source


def test_a_count_means_nodes_and_processes_on_the_local_machine() -> None:
    assert cluster("dgx-h100x16").num_devices == 128
    local = cluster("local-cpux4")
    assert (local.num_nodes, local.num_devices) == (1, 4)
    assert cluster("mi300x").num_devices == 8
    assert cluster("mi300xx2").num_devices == 16


def test_equal_devices_are_not_equally_fast() -> None:
    assert cluster("dgx-h100").groups[0].device.speed_spread == 0.008
    assert cluster("local-cpu").groups[0].device.speed_spread == 0


def test_a_rate_behind_a_preset_is_that_of_the_network_per_device() -> None:
    default, slow = cluster("dgx-h100x16"), cluster("dgx-h100x16@100g")
    assert (slow.name, slow.network.name) == ("dgx-h100x16@100g", "ndr-ib@100g")
    # 47 of 400 Gb/s are reached, so 11.75 of 100.
    assert slow.network.bytes_per_s == pytest.approx(11.75e9)
    assert slow.network.source.endswith("gb_per_s in proportion to 100 Gb/s per device")
    assert slow.groups == default.groups
    assert cluster("dgx-h100x16@400g").network == default.network
    assert cluster("a100-pcie-80@12.5g").network.name == "hdr-ib@12.5g"
    assert resolve_cluster("dgx-h100@200g", 16).num_nodes == 2


def test_a_node_is_what_one_link_joins() -> None:
    domain = cluster("gb200-nvl72x2")
    assert (domain.num_nodes, domain.num_devices) == (2, 144)
    assert cluster("a100-pcie-80").network.name == "hdr-ib@25g"


@pytest.mark.parametrize(
    ("text", "num_devices", "nodes", "per_node"),
    [
        ("dgx-h100", None, 1, 8),
        ("dgx-h100", 3, 1, 3),
        ("dgx-h100", 64, 8, 8),
        ("dgx-h100x16", 64, 8, 8),
        ("dgx-h100x16", 2, 1, 2),
        ("local-cpu", 4, 1, 4),
        ("local-cpux8", 4, 1, 4),
    ],
)
def test_devices_picks_part_of_a_node_or_whole_nodes(
    text: str, num_devices: int | None, nodes: int, per_node: int
) -> None:
    group = resolve_cluster(text, num_devices).groups[0]
    assert (group.num_nodes, group.devices_per_node) == (nodes, per_node)


@pytest.mark.parametrize(
    ("text", "num_devices", "message"),
    [
        ("dgx-h10", None, "cluster: unknown preset 'dgx-h10'; did you mean dgx-h100?"),
        ("mi300x2", None, "did you mean mi300x?"),
        ("dgx-h100xtwo", None, "did you mean dgx-h100?"),
        ("?!", None, "presets are dgx-a100-40, dgx-a100-80"),
        ("dgx-h10@400g", None, "cluster: unknown preset 'dgx-h10'; did you mean dgx-h100?"),
        ("dgx-h100@fast", None, "cluster: 'dgx-h100@fast': 'fast' is no rate of a network; write"),
        ("dgx-h100@", None, "'' is no rate of a network; write Gb/s per device"),
        ("dgx-h100@0g", None, "'0g' is no rate of a network"),
        ("dgx-h100@400gx2", None, "behind the number of nodes, such as @400g"),
        ("local-cpux2@1g", None, "local-cpu has no network; leave @1g out"),
        ("dgx-h100x0", None, "'dgx-h100x0' asks for 0 nodes; write x1 or more"),
        ("dgx-h100x-2", None, "asks for -2 nodes"),
        ("dgx-h100", 0, "devices: must be 1 or more, got 0"),
        ("dgx-h100", -4, "devices: must be 1 or more, got -4"),
        ("dgx-h100", 12, "devices: 12 are no whole nodes of 8 devices (dgx-h100x2); take 8 or 16"),
        ("dgx-h100x2", 32, "devices: 32 asked for, cluster dgx-h100x2 has 16"),
        ("no/such.json", None, "no/such.json: cannot be read (No such file or directory)"),
    ],
)
def test_bad_requests_are_answered_in_one_line(
    text: str, num_devices: int | None, message: str
) -> None:
    with pytest.raises(ClusterSpecError) as caught:
        resolve_cluster(text, num_devices)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_subset_of_a_file_is_that_of_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(cluster_text(cluster("dgx-v100x4")))
    assert resolve_cluster(str(path)) == cluster("dgx-v100x4")
    assert resolve_cluster(str(path), 16).num_nodes == 2
    with pytest.raises(ClusterSpecError, match="64 asked for, cluster dgx-v100x4 has 32"):
        resolve_cluster(str(path), 64)


def test_subsets_of_unequal_groups_are_taken_in_order() -> None:
    first, second = cluster("dgx-h100x2"), cluster("dgx-v100x2")
    mixed = ClusterSpec("mixed", (*first.groups, *second.groups), first.network)
    assert subset(mixed, 32) is mixed
    assert mixed.host_bytes_per_s == 15.75e9
    assert [g.num_nodes for g in subset(mixed, 24).groups] == [2, 1]
    assert [g.device.name for g in subset(mixed, 8).groups] == ["H100-SXM5-80GB"]
    with pytest.raises(ClusterSpecError, match="20 are no whole nodes of 8 devices"):
        subset(mixed, 20)
    with pytest.raises(ClusterSpecError, match="must be 1 or more"):
        subset(mixed, 0)
