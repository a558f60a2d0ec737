"""Where the ranks of a collective sit: how many nodes a group crosses and how it loads them.

Ranks fill the nodes in order, and the last axis of a mesh varies fastest, so the innermost axis
stays inside a node as long as it can. Pure counting; no times.
"""

import itertools
import math
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
    digits = list(zip(mesh.sizes, _strides(mesh), strict=False))
    per_node = {g.devices_per_node for g in cluster.groups}
    # Where nodes are alike, digits that step by whole nodes meet the same pattern in each of them.
    period = per_node.pop() if len(per_node) == 1 else 0
    is_inner = [not period or stride % period > 0 for _, stride in digits]
    repeats = math.prod(digits[k][0] for k in axes if not is_inner[k])
    offsets = _rank_sums([digits[k] for k in axes if is_inner[k]])
    bases = _rank_sums([d for k, d in enumerate(digits) if is_inner[k] and k not in axes])
    if period:
        groups = [[(base + offset) // period for offset in offsets] for base in bases]
    else:
        node_of = _node_of_rank(cluster)
        groups = [[node_of[base + offset] for offset in offsets] for base in bases]
    shapes = [_shape_of(nodes, repeats) for nodes in groups]
    return max(shapes, key=lambda s: (s.num_nodes, -s.min_per_node, s.max_per_node))


def slowest_link(cluster: ClusterSpec, shape: GroupShape) -> LinkSpec:
    """The network where a group crosses nodes, else the slowest link inside a node."""
    if shape.crosses_nodes:
        return cluster.network
    return min((g.link for g in cluster.groups), key=lambda link: link.bytes_per_s)


def _shape_of(nodes: list[int], repeats: int) -> GroupShape:
    """The shape of a group whose ranks on the nodes `nodes` repeat on as many others."""
    counts: dict[int, int] = {}
    for node in nodes:
        counts[node] = counts.get(node, 0) + 1
    most, least = max(counts.values()), min(counts.values())
    return GroupShape(repeats * len(nodes), repeats * len(counts), most, least)


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
