"""Collectives against hand-computed times, published measurements, and monotonicity."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfold.cost_models.hardware.devices import cluster, presets
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.cost_models.hardware.topology import GroupShape
from meshfold.cost_models.op_costs.collective_time import (
    KINDS,
    collective_s,
    congestion_factor,
    link_rate_bytes_per_s,
    transfer_s,
)
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.cluster import LinkSpec

MIB = 2**20
GIB = 2**30

# Round figures: 100 bytes per second and 1 s per step in a node, 10 and 5 over the network.
LINK = LinkSpec("link", 100.0, 1.0, "test", start_s=0.5)
NETWORK = LinkSpec("network", 10.0, 5.0, "test", start_s=2.0)
NODE = GroupShape(num_ranks=4, num_nodes=1, max_per_node=4, min_per_node=4)
CROSS = GroupShape(num_ranks=8, num_nodes=2, max_per_node=4, min_per_node=4)
WIDE = GroupShape(num_ranks=16, num_nodes=4, max_per_node=4, min_per_node=4)
RAIL = GroupShape(num_ranks=4, num_nodes=4, max_per_node=1, min_per_node=1)


@pytest.mark.parametrize(
    ("kind", "group", "expected_s"),
    [
        # 0.5 start + 3 steps + 800 * 3/4 bytes at 100
        ("all_gather", NODE, 0.5 + 3 + 6),
        ("reduce_scatter", NODE, 0.5 + 3 + 6),
        ("all_reduce", NODE, 0.5 + 6 + 12),
        # 800 * 3/4 to three peers at 0.89 of the rate
        ("all_to_all", NODE, 0.5 + 3 + 600 / 89),
        # 6 hops in nodes, 1 bulk hop of 3.5 * 5 between; each of 7 steps waits 5/4 * 1/2 for
        # the slower of 2 hops; 800 * 7/8 through 4 ports of 10
        ("all_gather", CROSS, 2 + 6 + 17.5 + 7 * 0.625 + 700 / 40),
        # tree: chains of 3, one level of 2 nodes, up and down; between them 800 bytes, in a node
        # 1600 at 100; the ring would wait 56 and take 1400 / 40
        ("all_reduce", CROSS, 2 + 2 * (3 + 17.5) + 800 / (0.92 * 40)),
        # tree: 2 levels of 4 nodes, 1600 bytes everywhere
        ("all_reduce", WIDE, 2 + 2 * (3 + 2 * 17.5) + 1600 / (0.92 * 40)),
        # ring: 6 bulk hops, each step waits 5/4 * (1/2 + 1/3 + 1/4) for the slowest of 4 hops; the
        # tree has 4 hops and takes 1600 / 9.2
        ("all_reduce", RAIL, 2 + 6 * 17.5 + 6 * 65 / 48 + 1200 / 10),
        # 3 near peers take 300 bytes; 4 far ones, all at once, 400 through one port
        ("all_to_all", CROSS, 2 + (3 + 5) + 400 / 10),
        # 800 to the next rank; between nodes through one port
        ("shift", NODE, 0.5 + 1 + 8),
        ("shift", CROSS, 2 + 5 + 80),
        ("shift", RAIL, 2 + 5 + 80),
        ("reduce_scatter", RAIL, 2 + 3 * 17.5 + 3 * 65 / 48 + 600 / 10),
        ("all_to_all", RAIL, 2 + 5 + 600 / 10),
    ],
)
def test_hand_computed_times(kind: str, group: GroupShape, expected_s: float) -> None:
    assert collective_s(kind, 800, group, LINK, NETWORK) == pytest.approx(expected_s)


def test_few_bytes_take_the_protocol_of_low_latency() -> None:
    # 3 hops of 5 and 3 waits of 65/48; 6 bytes at an eighth of 10
    expected_s = 2 + 3 * 5 + 3 * 65 / 48 + 6 / 10 * 8
    assert collective_s("all_gather", 8, RAIL, LINK, NETWORK) == pytest.approx(expected_s)


def test_a_switch_that_reduces_carries_all_bytes_and_one_share() -> None:
    link = LinkSpec("link", 100.0, 1.0, "test", start_s=0.5, reduce_bytes_per_s=200.0)
    small = GroupShape(2, 1, 2, 2)
    assert collective_s("all_reduce", 800, NODE, link, NETWORK) == pytest.approx(0.5 + 1000 / 200)
    assert collective_s("all_reduce", 800, small, link, NETWORK) == pytest.approx(0.5 + 1200 / 200)
    assert collective_s("all_gather", 800, NODE, link, NETWORK) == pytest.approx(9.5)


def test_a_tree_over_nodes_reduces_in_their_switches() -> None:
    link = LinkSpec("link", 100.0, 1.0, "test", start_s=0.5, reduce_bytes_per_s=40.0)
    expected_s = 2 + 2 * (3 + 17.5) + 1000 / 40
    assert collective_s("all_reduce", 800, CROSS, link, NETWORK) == pytest.approx(expected_s)


def test_ramp_halves_the_rate_at_its_own_size() -> None:
    # A ring of 4 moves 800 / 4 at a time.
    link = LinkSpec("link", 100.0, 0.0, "test", ramp_bytes=200.0)
    assert collective_s("all_gather", 800, NODE, link, NETWORK) == pytest.approx(12)
    assert transfer_s(200, link) == pytest.approx(4)


def test_levels_of_switches_are_congested() -> None:
    network = replace(NETWORK, congestion=0.5)
    assert [congestion_factor(network, m) for m in (2, 32, 1024)] == pytest.approx([1, 1, 1.5])
    # The logarithm of 64 to base 32 is 6/5.
    assert congestion_factor(network, 64) == pytest.approx(1.1)
    wide = GroupShape(1024, 1024, 1, 1)
    seconds = [collective_s("all_gather", 10**6, wide, LINK, n) for n in (NETWORK, network)]
    assert seconds[1] - seconds[0] == pytest.approx(0.5 * 10**6 * 1023 / 1024 / 10)


@pytest.mark.parametrize(("group", "expected_s"), [(NODE, 4 * 0.25), (CROSS, 8 * 2.0)])
@pytest.mark.parametrize("kind", KINDS)
def test_lists_of_tensors_cost_by_rank(kind: str, group: GroupShape, expected_s: float) -> None:
    """4 tensors at 1/4 s, 8 at 2 s: of the outer level, and of gathers and reductions alone."""
    flat = collective_s(kind, 800, group, LINK, NETWORK)
    listed = collective_s(
        kind, 800, group, replace(LINK, rank_s=0.25), replace(NETWORK, rank_s=2.0)
    )
    is_listed = kind in ("all_gather", "reduce_scatter")
    assert listed - flat == pytest.approx(expected_s if is_listed else 0.0)


def test_small_groups_take_the_measured_rate() -> None:
    link = LinkSpec("link", 100.0, 0.0, "test", bytes_per_s_by_ranks=((2, 20.0), (4, 60.0)))
    assert [link_rate_bytes_per_s(link, n) for n in (2, 3, 4, 8)] == [20, 40, 60, 60]
    assert link_rate_bytes_per_s(LINK, 3) == 100


def test_one_rank_or_no_bytes_cost_nothing() -> None:
    alone = GroupShape(1, 1, 1, 1)
    for kind in KINDS:
        assert collective_s(kind, 800, alone, LINK, NETWORK) == 0
        assert collective_s(kind, 0, NODE, LINK, NETWORK) == 0


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown collective 'gossip'; known are all_gather"):
        collective_s("gossip", 8, NODE, LINK, NETWORK)


# (preset, nodes, mesh, axes, kind, bytes, published bus bandwidth GB/s, tolerance)
MEASURED = [
    # VIA-Research/vTrain@f8dda84 trace/a100, nccl-tests on A100 SXM4
    ("dgx-a100-80", 1, (1, 8), "all_reduce", GIB, 229.35, 0.05),
    ("dgx-a100-80", 1, (1, 8), "all_reduce", 64 * MIB, 202.5, 0.15),
    ("dgx-a100-80", 1, (1, 8), "all_reduce", 16 * MIB, 126.3, 0.15),
    ("dgx-a100-80", 1, (1, 8), "all_reduce", MIB, 19.78, 0.25),
    ("dgx-a100-80", 1, (4, 2), "all_reduce", GIB, 197.3, 0.15),
    ("dgx-a100-80", 1, (2, 4), "all_reduce", 64 * MIB, 185.1, 0.15),
    # NVIDIA/nccl#812: DGX A100s, 8 ports of 200 Gb/s each, the tree on 2 nodes
    ("dgx-a100-80", 2, (1, 16), "all_reduce", 8 * GIB, 192, 0.05),
    # NVIDIA/nccl-tests#175: 4 ports of 200 Gb/s for 8 GPUs; ours have 8, so twice that in a ring
    ("dgx-a100-80", 4, (1, 32), "all_reduce", 8 * GIB, 2 * 86, 0.15),
    # NVIDIA/dgxc-benchmarking nccl README, NVLS
    ("dgx-h100", 1, (1, 8), "all_reduce", 16 * GIB, 479.9, 0.05),
    ("dgx-h100", 1, (1, 8), "all_reduce", GIB, 466.3, 0.05),
    ("dgx-h100", 1, (1, 8), "all_reduce", 64 * MIB, 361.7, 0.15),
    ("dgx-h100", 1, (1, 8), "all_reduce", 16 * MIB, 237.2, 0.15),
    ("dgx-h100", 1, (1, 8), "all_reduce", MIB, 67.0, 0.15),
    # stas00/ml-engineering network README
    ("dgx-h200", 1, (1, 8), "all_reduce", 8 * GIB, 473.1, 0.05),
    ("dgx-h200", 1, (2, 4), "all_reduce", 8 * GIB, 363.3, 0.05),
    ("dgx-h200", 1, (1, 8), "all_gather", 16 * GIB, 361.4, 0.05),
    ("dgx-h200", 1, (1, 8), "reduce_scatter", 16 * GIB, 362.9, 0.05),
    ("dgx-b200", 1, (1, 8), "all_reduce", 8 * GIB, 838.0, 0.05),
    ("dgx-b200", 1, (2, 4), "all_reduce", 8 * GIB, 673.2, 0.05),
    # NVIDIA/nccl#1374, NVIDIA/nccl#1218
    ("dgx-h800", 1, (1, 8), "all_reduce", 8 * GIB, 215, 0.05),
    ("dgx-h100", 32, (1, 256), "all_gather", 2 * GIB, 200, 0.50),
    ("dgx-h100", 32, (1, 256), "all_reduce", 2 * GIB, 340, 0.05),
    ("mi300x", 1, (1, 8), "all_reduce", 4 * GIB, 312.9, 0.05),
    ("mi300x", 1, (4, 2), "all_reduce", 4 * GIB, 47.7, 0.05),
    # VIA-Research/vTrain@f8dda84 trace/v100: the cube mesh serves 4 and 8, not 6
    ("dgx-v100", 1, (1, 8), "all_reduce", GIB, 134.5, 0.05),
    ("dgx-v100", 1, (4, 2), "all_reduce", GIB, 22.55, 0.05),
    ("dgx-v100", 1, (2, 4), "all_reduce", 16 * MIB, 77.6, 0.15),
]


@pytest.mark.parametrize(
    ("preset", "nodes", "degrees", "kind", "num_bytes", "bus_gb_per_s", "tolerance"), MEASURED
)
def test_published_measurements(
    preset: str,
    nodes: int,
    degrees: tuple[int, int],
    kind: str,
    num_bytes: int,
    bus_gb_per_s: float,
    tolerance: float,
) -> None:
    spec = cluster(f"{preset}x{nodes}")
    mesh = build_mesh(spec, *degrees)
    seconds = CostModel(spec, mesh).collective_s(kind, num_bytes, (mesh.index("tp"),))
    # Bus bandwidth as nccl-tests defines it.
    n = degrees[1]
    passes = 2 if kind == "all_reduce" else 1
    predicted = passes * (n - 1) / n * num_bytes / seconds / 1e9
    assert predicted == pytest.approx(bus_gb_per_s, rel=tolerance)


@given(
    preset=st.sampled_from(sorted(presets())),
    kind=st.sampled_from(KINDS),
    sizes=st.tuples(st.integers(1, 2**36), st.integers(1, 2**36)),
    degrees=st.sampled_from([(1, 2), (2, 2), (1, 8), (4, 8), (8, 4), (2, 16)]),
)
def test_more_bytes_are_never_faster(
    preset: str, kind: str, sizes: tuple[int, int], degrees: tuple[int, int]
) -> None:
    spec = cluster(f"{preset}x32")
    mesh = build_mesh(spec, *degrees)
    costs = CostModel(spec, mesh)
    low, high = sorted(sizes)
    for axis in range(len(mesh.axes)):
        assert 0 < costs.collective_s(kind, low, (axis,)) <= costs.collective_s(kind, high, (axis,))


@given(
    kind=st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
    size=st.integers(1, 2**36),
)
def test_an_all_reduce_costs_at_most_its_two_halves(kind: str, size: int) -> None:
    for name in presets():
        spec = cluster(f"{name}x8")
        costs = CostModel(spec, build_mesh(spec, 1, 8))
        halves = costs.collective_s("all_gather", size, (0,)) + costs.collective_s(
            "reduce_scatter", size, (0,)
        )
        assert costs.collective_s("all_reduce", size, (0,)) <= halves * (1 + 1e-12)


@given(
    kind=st.sampled_from(KINDS),
    size=st.integers(1, 2**36),
    nodes=st.tuples(st.integers(2, 2000), st.integers(2, 2000)),
    per_node=st.integers(1, 8),
    preset=st.sampled_from(sorted(set(presets()) - {"local-cpu"})),
)
def test_more_nodes_are_never_faster(
    kind: str, size: int, nodes: tuple[int, int], per_node: int, preset: str
) -> None:
    spec = cluster(preset)
    link, network = spec.groups[0].link, spec.network
    few, many = (
        collective_s(kind, size, GroupShape(m * per_node, m, per_node, per_node), link, network)
        for m in sorted(nodes)
    )
    assert few <= many * (1 + 1e-12)


@given(
    kind=st.sampled_from(KINDS),
    size=st.integers(1, 2**36),
    ranks=st.tuples(st.integers(1, 72), st.integers(1, 72)),
)
def test_more_ranks_of_a_node_are_never_faster(
    kind: str, size: int, ranks: tuple[int, int]
) -> None:
    """Where all have the same rate and no switch reduces: the more share that, the faster."""
    link = LinkSpec("link", 2e11, 2e-6, "test", start_s=2e-5, ramp_bytes=1e6)
    few, many = (
        collective_s(kind, size, GroupShape(n, 1, n, n), link, NETWORK) for n in sorted(ranks)
    )
    assert few <= many * (1 + 1e-12)
