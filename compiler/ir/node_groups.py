"""All-reduces in three phases, by the nodes that a group of ranks lies on.

    reduce-scatter   among the ranks of a node       every rank has a part of the node's sum
    all-reduce       among those that have the same part, one per node
    all-gather       among the ranks of a node

With k ranks on each of m nodes only 1 / k of the bytes crosses the network per rank, (m - 1) / m of
it each way, while a ring over all passes (n - 1) / n of everything through every node (Jia et al.,
"Highly Scalable Deep Learning Training System with Mixed-Precision", 2018). The phases load
different links, so they are cut in pieces, all of which go from phase to phase, and of reductions
that follow each other the next is in its first phase while this one is in its second (`Turns`).

A group is written as its axes, and a level of it as these and IN_NODE or ACROSS_NODES at the end.
Layer 0: what prices phases, what simulates them and what runs them ask here.
"""

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.mesh import Mesh, MeshAxis

IN_NODE, ACROSS_NODES = "in-node", "across-nodes"
PHASES = 3
MOST_PIECES = 16
"""Of one all-reduce: more hide nothing more, and thousands of small collectives at a time have
crashed gloo."""

Axes = tuple[str, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class NodeLevels:
    """Groups of `mesh` by node. node_ranks: ranks per node, which fill nodes in order; 0 where
    nodes differ."""

    mesh: Mesh
    node_ranks: int

    def sizes(self, axes: Axes) -> tuple[int, int] | None:
        """(ranks of a group on each of its nodes, its nodes); None where that differs, or where
        there is one level alone."""
        if self._fine is None:
            return None
        in_node, across = (self._size(axes, level, self._fine) for level in (IN_NODE, ACROSS_NODES))
        return (in_node, across) if in_node > 1 and across > 1 else None

    def groups(self, axes: Axes) -> Iterator[tuple[int, ...]]:
        """As Mesh.groups, of the axes together or of one of their levels. Raises ValueError as
        resolved."""
        mesh, names = self.resolved(axes)
        return mesh.groups(names)

    def resolved(self, axes: Axes) -> tuple[Mesh, Axes]:
        """A mesh of the same ranks, and the axes of it that are meant.

        Raises ValueError for a level of groups that have none.
        """
        *names, level = axes or ("",)
        if level not in (IN_NODE, ACROSS_NODES):
            return self.mesh, axes
        if self._fine is None or self.sizes(tuple(names)) is None:
            raise ValueError(
                f"groups of {' x '.join(names)} on {self.mesh} have no levels, with "
                f"{self.node_ranks} ranks a node"
            )
        return self._fine, tuple(_digit(name, level) for name in names)

    @cached_property
    def _fine(self) -> Mesh | None:
        """Every axis as two, the part across nodes and the part in a node; None where the border
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


@dataclass(frozen=True, slots=True)
class Cut:
    """Of an all-reduce: ranks of its group on each of `nodes`, and pieces."""

    ranks: int
    nodes: int
    pieces: int


@dataclass(frozen=True)
class Hierarchy:
    """Which all-reduces of gradients run in phases: those of piece_bytes or more, in pieces of so
    many at least, MOST_PIECES at most, over groups that have levels."""

    levels: NodeLevels
    piece_bytes: int

    @property
    def has_levels(self) -> bool:
        """Whether the ranks of all axes together lie on several nodes alike."""
        return self.levels.sizes(self.levels.mesh.names) is not None

    def __str__(self) -> str:
        return (
            f"all-reduces of gradients in phases, by nodes of {self.levels.node_ranks}, in pieces "
            f"of {self.piece_bytes} bytes"
        )

    def cut(self, axes: Axes, num_bytes: int) -> Cut | None:
        """How an all-reduce runs; None if whole."""
        sizes = self.levels.sizes(axes) if num_bytes >= self.piece_bytes else None
        if sizes is None:
            return None
        return Cut(*sizes, min(MOST_PIECES, num_bytes // self.piece_bytes))


def node_levels(cluster: ClusterSpec, mesh: Mesh) -> NodeLevels:
    """Of the first devices of `cluster`."""
    sizes = {group.devices_per_node for group in cluster.groups}
    return NodeLevels(mesh, sizes.pop() if len(sizes) == 1 else 0)


class Turns(Generic[T]):
    """What runs in PHASES phases, one after the other begun. Each is a generator that starts a
    phase and yields; when it goes on it waits for that, and starts the next. Whenever one begins,
    those on their way go on by one phase, the oldest first: so all ranks start the same phases in
    the same order, and waits come late."""

    def __init__(self) -> None:
        self._running: deque[Generator[None, None, T]] = deque()
        self._started: dict[Generator[None, None, T], int] = {}

    def begin(self, phases: Generator[None, None, T]) -> None:
        self._go_on()
        next(phases)
        self._running.append(phases)
        self._started[phases] = 1

    def finish(self, phases: Generator[None, None, T]) -> T:
        """What it returns. Those behind it go on as well."""
        while self._started[phases] < PHASES:
            self._go_on()
        self._running.remove(phases)
        del self._started[phases]
        try:
            next(phases)
        except StopIteration as end:
            result: T = end.value
            return result
        raise AssertionError(f"there are {PHASES} phases")

    def _go_on(self) -> None:
        for phases in self._running:
            if self._started[phases] < PHASES:
                next(phases)
                self._started[phases] += 1
