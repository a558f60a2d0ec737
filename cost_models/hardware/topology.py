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
    if len(per_node) > 1:
        node_of = _node_of_rank(cluster)
        others = _rank_sums([d for k, d in enumerate(digits) if k not in axes])
        offsets = _rank_sums([digits[k] for k in axes])
        groups, repeats = [[node_of[base + o] for o in offsets] for base in others], 1
    else:
        groups, repeats = _alike(digits, axes, per_node.pop())
    shapes = [_shape_of(nodes, repeats) for nodes in groups]
    return max(shapes, key=lambda s: (s.num_nodes, -s.min_per_node, s.max_per_node))


def _alike(
    digits: list[tuple[int, int]], axes: tuple[int, ...], per_node: int
) -> tuple[list[list[int]], int]:
    """The nodes of groups, one for every pattern that there is, and how often each group repeats
    its own on other nodes. digits: (size, stride) of the axes.

    An axis steps by whole nodes from some multiple of its stride on: there the pattern repeats.
    """
    own, others, repeats = [], [], 1
    for k, (size, stride) in enumerate(digits):
        period = per_node // math.gcd(stride, per_node)
        times = size // period if size % period == 0 else 1
        inner = (size // times, stride)
        if k in axes:
            own.append(inner)
            repeats *= times
        else:
            others.append(inner)
    offsets = _rank_sums(own)
    bases = {base % per_node for base in _rank_sums(others)}
    return [[(base + offset) // per_node for offset in offsets] for base in sorted(bases)], repeats


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
