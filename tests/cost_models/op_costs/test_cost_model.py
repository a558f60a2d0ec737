"""CostModel: roofline, groups of axes, refusals."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.cost_models.op_costs.compute import Work
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.errors import ClusterSpecError
from meshfold.ir.cluster import ClusterSpec, DeviceSpec, LinkSpec, NodeGroup
from meshfold.ir.mesh import Mesh, MeshAxis

SLOW = DeviceSpec("slow", 1000, 50.0, {"float32": 10.0, "bfloat16": 40.0}, 0.5, 0.8, 2.0, 0, "test")
FAST = DeviceSpec("fast", 2000, 90.0, {"float32": 20.0}, 0.5, 0.8, 1.0, 10, "test")
LINK = LinkSpec("link", 100.0, 1.0, "test")
NETWORK = LinkSpec("network", 10.0, 5.0, "test")
MIXED = ClusterSpec("mixed", (NodeGroup(FAST, 2, 4, LINK), NodeGroup(SLOW, 1, 4, LINK)), NETWORK)


def test_a_kernel_is_its_launch_its_flops_and_its_bytes() -> None:
    costs = CostModel(MIXED, Mesh(()))
    assert costs.launch_s == 2
    assert costs.compute_s(100, 0, "float32") == pytest.approx(2 + 100 / 5)
    assert costs.compute_s(100, 0, "bfloat16") == pytest.approx(2 + 100 / 20)
    assert costs.compute_s(100, 4000, "float32") == pytest.approx(2 + 20 + 100)
    assert costs.compute_s(0, 0, "float32") == 0


def test_what_an_op_makes_inside_is_divided_as_its_flops() -> None:
    """4000 bytes forward of which 3200 are made inside, on 8 shards of the work and a half of the
    operands: 800 / 2 + 3200 / 8; backward 8000 and 7200."""
    costs = CostModel(MIXED, Mesh(()))
    made = Work(0.0, 4000, 0.0, 8000, inner_bytes=(3200, 7200))
    assert costs.op_s(made, "float32", 8, 0.5) == pytest.approx((2 + 800 / 40, 2 + 1300 / 40))
    whole = costs.op_s(made, "float32")
    assert whole == costs.op_s(Work(0.0, 4000, 0.0, 8000), "float32")


def test_a_dtype_without_a_peak_runs_at_the_float32_rate() -> None:
    costs = CostModel(MIXED, Mesh(()))
    assert costs.compute_s(100, 0, "float16") == costs.compute_s(100, 0, "float32")


def test_unequal_hardware_is_as_slow_as_its_slowest_and_as_small_as_its_smallest() -> None:
    assert CostModel(MIXED, Mesh(())).device == SLOW
    assert MIXED.memory_bytes == 1000 and MIXED.reserve_bytes == 10
    assert MIXED.num_nodes == 3 and MIXED.num_devices == 12


def test_the_slowest_of_equal_devices_decides() -> None:
    spread = replace(SLOW, speed_spread=0.01)
    eight = ClusterSpec("eight", (NodeGroup(spread, 1, 8, LINK),), NETWORK)
    costs = CostModel(eight, Mesh(()))
    slower = 1 + 0.01 * math.sqrt(2 * math.log(8))
    assert costs.launch_s == pytest.approx(2 * slower)
    assert costs.compute_s(100, 0, "float32") == pytest.approx((2 + 20) * slower)
    assert costs.compute_s(0, 4000, "float32") == pytest.approx((2 + 100) * slower)
    alone = ClusterSpec("alone", (NodeGroup(spread, 1, 1, LINK),), NETWORK)
    assert CostModel(alone, Mesh(())).device == spread


def test_each_axis_knows_its_slowest_link() -> None:
    costs = CostModel(MIXED, build_mesh(MIXED, 3, 4))
    assert [costs.group_link([0]).name, costs.group_link([1]).name] == ["network", "link"]
    assert costs.collective_s("all_gather", 120, (1,)) == pytest.approx(3 + 90 / 100)
    # 2 bulk hops of 17.5, and 2 steps that wait 5/4 * (1/2 + 1/3) for the slowest of 3 hops.
    wait = 25 / 24
    assert costs.collective_s("all_gather", 120, (0,)) == pytest.approx(35 + 2 * wait + 80 / 10)
    # Both axes together: 9 hops in nodes, 2 of low latency between, 11 steps, 4 ports at an eighth
    # of their rate; in any order.
    both = 9 + 10 + 11 * wait + 110 / 5
    assert costs.collective_s("all_gather", 120, (0, 1)) == pytest.approx(both)
    assert costs.collective_s("all_gather", 120, (1, 0)) == pytest.approx(both)
    assert costs.collective_s("all_gather", 120, ()) == 0


def test_a_mesh_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(ClusterSpecError, match="has 12 devices, the mesh dp16 needs 16"):
        CostModel(MIXED, Mesh((MeshAxis("dp", 16),)))


@given(st.floats(0, 1e18), st.floats(0, 1e18), st.floats(1, 2), st.floats(1, 2))
def test_more_work_is_never_faster(flops: float, size: float, more: float, larger: float) -> None:
    costs = CostModel(MIXED, Mesh(()))
    assert costs.compute_s(flops, size, "float32") <= costs.compute_s(
        flops * more, size * larger, "float32"
    )
