"""Where the ranks of a collective sit: how many nodes a group crosses and how it loads them.

Ranks fill the nodes in order, and the last axis of a mesh varies fastest, so the innermost axis
stays inside a node as long as it can. Pure counting; no times.
"""

import itertools
from dataclasses import dataclass

from meshfold.ir.cluster import ClusterSpec, LinkSpec
from meshfold.ir.mesh import Mesh


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A group of `num_ranks` ranks on `num_nodes` nodes. `max_per_node` and `min_per_node` are its
    ranks on the fullest and on the emptiest of these nodes."""

    num_ranks: int
    num_nodes: int
    max_per_node: int
    min_per_node: int

    @property
    def crosses_nodes(self) -> bool:
        return self.num_nodes > 1


def group_shape(cluster: ClusterSpec, mesh: Mesh, axes: tuple[int, ...]) -> GroupShape:
    """Shape of the worst group over the mesh axes `axes` together: the one on most nodes, then
    with the fewest ranks on its emptiest node, which has the fewest network ports to share."""
    strides = _strides(mesh)
    offsets = _rank_sums([(mesh.sizes[k], strides[k]) for k in axes])
    others = [k for k in range(len(mesh.axes)) if k not in axes]
    bases = _rank_sums([(mesh.sizes[k], strides[k]) for k in others])
    per_node = {g.devices_per_node for g in cluster.groups}
    if len(per_node) == 1:
        # Groups that start at the same place in their node meet the same pattern of nodes.
        bases = list({base % min(per_node): base for base in bases}.values())
    node_of = _node_of_rank(cluster)
    shapes = [_shape_of([node_of[base + o] for o in offsets]) for base in bases]
    return max(shapes, key=lambda s: (s.num_nodes, -s.min_per_node, s.max_per_node))


def slowest_link(cluster: ClusterSpec, shape: GroupShape) -> LinkSpec:
    """The network where a group crosses nodes, else the slowest link inside a node."""
    if shape.crosses_nodes:
        return cluster.network
    return min((g.link for g in cluster.groups), key=lambda link: link.bytes_per_s)


def _shape_of(nodes: list[int]) -> GroupShape:
    counts: dict[int, int] = {}
    for node in nodes:
        counts[node] = counts.get(node, 0) + 1
    return GroupShape(len(nodes), len(counts), max(counts.values()), min(counts.values()))


def _strides(mesh: Mesh) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(mesh.sizes[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def _rank_sums(digits: list[tuple[int, int]]) -> list[int]:
    """All sums of one multiple per digit (size, stride)."""
    choices = [range(0, size * stride, stride) for size, stride in digits]
    return [sum(pick) for pick in itertools.product(*choices)]


def _node_of_rank(cluster: ClusterSpec) -> list[int]:
    nodes = itertools.count()
    return [
        node
        for group in cluster.groups
        for node in itertools.islice(nodes, group.num_nodes)
        for _ in range(group.devices_per_node)
    ]
