"""The nodes that groups of ranks lie on. A group is written as its axes, of the mesh or of its
storage mesh, and a level of it as these and IN_NODE or ACROSS_NODES at the end."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.mesh import REPLICATE_AXIS, SHARD_AXIS, Mesh, MeshAxis

IN_NODE, ACROSS_NODES = "in-node", "across-nodes"
NUM_STEPS = 3
"""Collectives of a hierarchical all-reduce (meshfold.hierarchical_all_reduce)."""

Axes = tuple[str, ...]


@dataclass(frozen=True)
class NodeLevels:
    """Groups of `mesh` by node. node_ranks: ranks per node, which fill nodes in order; 0 where
    nodes differ."""

    mesh: Mesh
    node_ranks: int

    def sizes(self, axes: Axes) -> tuple[int, int] | None:
        """(ranks of a group on each of its nodes, its nodes); None where that differs, or where
        there is one level alone."""
        if (storage := self._of_storage(axes)) is not None:
            return storage.sizes(axes)
        if self._fine is None:
            return None
        in_node, across = (self._size(axes, level, self._fine) for level in (IN_NODE, ACROSS_NODES))
        return (in_node, across) if in_node > 1 and across > 1 else None

    def groups(self, axes: Axes) -> Iterator[tuple[int, ...]]:
        """The groups, as Mesh.groups gives them, of the axes together or of one of their levels.
        Raises ValueError as resolved."""
        mesh, names = self.resolved(axes)
        return mesh.groups(names)

    def resolved(self, axes: Axes) -> tuple[Mesh, Axes]:
        """A mesh of the same ranks, and the axes of it that are meant.

        Raises ValueError for a level of groups that have none.
        """
        if (storage := self._of_storage(axes)) is not None:
            return storage.resolved(axes)
        *names, level = axes or ("",)
        if level not in (IN_NODE, ACROSS_NODES):
            return self.mesh, axes
        if self._fine is None or self.sizes(tuple(names)) is None:
            raise ValueError(
                f"groups of {' x '.join(names)} on {self.mesh} have no levels, with "
                f"{self.node_ranks} ranks a node"
            )
        return self._fine, tuple(_digit(name, level) for name in names)

    def _of_storage(self, axes: Axes) -> "NodeLevels | None":
        """The levels of the storage mesh, if these are axes that it alone has."""
        is_there = self.mesh.replicas == 1 or not {REPLICATE_AXIS, SHARD_AXIS} & {*axes}
        return None if is_there else NodeLevels(self.mesh.storage, self.node_ranks)

    @cached_property
    def _fine(self) -> Mesh | None:
        """Every axis as two, across nodes and in a node; None where the boundary
        of nodes falls inside a digit that it does not divide."""
        left, axes = self.node_ranks, list[MeshAxis]()
        for axis in reversed(self.mesh.axes):
            if left and left % axis.size == 0:
                inside, left = axis.size, left // axis.size
            elif left and axis.size % left == 0:
                inside, left = left, 1
            else:
                return None
            axes.append(MeshAxis(_digit(axis.name, IN_NODE), inside))
            axes.append(MeshAxis(_digit(axis.name, ACROSS_NODES), axis.size // inside))
        return Mesh(tuple(reversed(axes)))

    def _size(self, axes: Axes, level: str, fine: Mesh) -> int:
        total = 1
        for name in axes:
            total *= fine.sizes[fine.index(_digit(name, level))]
        return total


def _digit(name: str, level: str) -> str:
    return f"{name} {level}"


def node_levels(cluster: ClusterSpec, mesh: Mesh) -> NodeLevels:
    """The node levels of a mesh of the first devices of `cluster`."""
    sizes = {group.devices_per_node for group in cluster.groups}
    return NodeLevels(mesh, sizes.pop() if len(sizes) == 1 else 0)
