"""One step of a conversion of layouts: one mesh axis changes its type."""

from dataclasses import dataclass

from meshfold.ir.spmd import Layout, SpmdType


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a conversion: `axis` goes from `source` to `target`, starting from the full
    layout `before`."""

    axis: int
    source: SpmdType
    target: SpmdType
    before: Layout

    @property
    def after(self) -> Layout:
        return with_type(self.before, self.axis, self.target)


def exchange_is_even(source: SpmdType, target: SpmdType, axis_size: int) -> bool:
    """Whether every rank of an axis sends as much to every other when a shard moves.

    True between dims. On one dim the two shards are digits of its index (meshfold.ir.spmd): what is
    sent is even when the digits do not overlap.
    """
    low, high = sorted((source.blocks, target.blocks))
    return source.dim != target.dim or high % (low * axis_size) == 0


def with_type(layout: Layout, axis: int, target: SpmdType) -> Layout:
    """`layout` with the type `target` on one axis."""
    return (*layout[:axis], target, *layout[axis + 1 :])
