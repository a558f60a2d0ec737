"""How groups of ranks lie on nodes, against counting rank by rank."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from meshfold.cost_models.hardware.topology import GroupShape, group_shape, slowest_link
from meshfold.ir.cluster import ClusterSpec, DeviceSpec, LinkSpec, NodeGroup
from meshfold.ir.mesh import Mesh, MeshAxis

DEVICE = DeviceSpec("d", 1000, 50.0, {"float32": 10.0}, 0.5, 0.8, 2.0, 0, "test")
LINK = LinkSpec("link", 100.0, 1.0, "test")
NETWORK = LinkSpec("network", 10.0, 5.0, "test")


def cluster(per_node: list[int]) -> ClusterSpec:
    return ClusterSpec("c", tuple(NodeGroup(DEVICE, 1, k, LINK) for k in per_node), NETWORK)


def mesh(*sizes: int) -> Mesh:
    return Mesh(tuple(MeshAxis(f"x{k}", size) for k, size in enumerate(sizes)))


@given(
    per_node=st.lists(st.integers(1, 6), min_size=1, max_size=6)
    | st.integers(1, 8).map(lambda size: [size]),
    sizes=st.lists(st.integers(1, 4), max_size=3),
    data=st.data(),
)
def test_the_worst_group_is_the_worst_of_all(
    per_node: list[int], sizes: list[int], data: st.DataObject
) -> None:
    while sum(per_node) < mesh(*sizes).num_ranks:
        per_node = per_node + per_node
    m = mesh(*sizes)
    axes = tuple(k for k in range(len(sizes)) if data.draw(st.booleans()))
    node_of = [node for node, size in enumerate(per_node) for _ in range(size)]
    shapes = []
    for group in m.groups(tuple(m.names[k] for k in axes)):
        counts = Counter(node_of[rank] for rank in group)
        low, high = min(counts.values()), max(counts.values())
        shapes.append(GroupShape(len(group), len(counts), high, low))
    worst = max(shapes, key=lambda s: (s.num_nodes, -s.min_per_node, s.max_per_node))
    assert group_shape(cluster(per_node), m, axes) == worst


def test_the_inner_axis_stays_in_its_node_and_the_outer_one_takes_one_rank_per_node() -> None:
    two_nodes = cluster([8, 8])
    assert group_shape(two_nodes, mesh(2, 8), (1,)) == GroupShape(8, 1, 8, 8)
    assert group_shape(two_nodes, mesh(2, 8), (0,)) == GroupShape(2, 2, 1, 1)
    assert group_shape(two_nodes, mesh(4, 4), (0,)) == GroupShape(4, 2, 2, 2)
    assert group_shape(two_nodes, mesh(2, 8), (0, 1)) == GroupShape(16, 2, 8, 8)
    assert slowest_link(two_nodes, GroupShape(8, 1, 8, 8)) == LINK
    assert slowest_link(two_nodes, GroupShape(2, 2, 1, 1)) == NETWORK
