"""Which all-reduces of gradients run hierarchically, and in how many pieces."""

from dataclasses import dataclass

from meshfold.ir.node_groups import Axes, NodeLevels

MOST_PIECES = 16
"""More pieces of an all-reduce hide nothing more, and thousands of small collectives at a time have
crashed gloo."""


@dataclass(frozen=True, slots=True)
class HierarchicalSplit:
    """An all-reduce over `ranks` ranks on each of `nodes` nodes, in pieces."""

    ranks: int
    nodes: int
    pieces: int


@dataclass(frozen=True)
class HierarchicalAllReduce:
    """The all-reduces of gradients that are hierarchical: those of piece_bytes or more, over groups
    that have levels, in at most MOST_PIECES pieces of at least piece_bytes."""

    levels: NodeLevels
    piece_bytes: int

    @property
    def has_levels(self) -> bool:
        """Whether the ranks of all axes together lie on several nodes alike."""
        return self.levels.sizes(self.levels.mesh.names) is not None

    def __str__(self) -> str:
        return (
            f"hierarchical all-reduces of gradients by nodes of {self.levels.node_ranks}, in "
            f"pieces of {self.piece_bytes} bytes"
        )

    def split(self, axes: Axes, num_bytes: int) -> HierarchicalSplit | None:
        """How an all-reduce runs; None if it is not hierarchical."""
        sizes = self.levels.sizes(axes) if num_bytes >= self.piece_bytes else None
        if sizes is None:
            return None
        return HierarchicalSplit(*sizes, min(MOST_PIECES, num_bytes // self.piece_bytes))
