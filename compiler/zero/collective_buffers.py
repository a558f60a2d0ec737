"""The flat buffer of one collective: of one parameter group, or of several in one bucket.

Unsharded it has a row per rank of the gather axes, what an all-gather gives and a reduce-scatter
takes; every group has columns of its own. A buffer of shards is one such row.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from torch import Tensor

from meshfold.zero.microbatch_state import Key


class CollectiveBuffer:
    """Where groups lie in a flat buffer. shard_numels: by key, the elements of one row."""

    def __init__(self, num_shards: int, shard_numels: Sequence[tuple[Key, int]]) -> None:
        self.num_shards = num_shards
        ranges = consecutive_ranges(numel for _, numel in shard_numels)
        self._ranges = dict(zip((key for key, _ in shard_numels), ranges, strict=True))
        self.numel = num_shards * ranges[-1][1]
        """Elements of the buffer, unsharded."""

    def columns(self, flat: Tensor, key: Key) -> Tensor:
        """A view of a group's columns [num_shards, elements of a row] of an unsharded buffer."""
        start, end = self._ranges[key]
        return flat.view(self.num_shards, -1)[:, start:end]

    def shards(self, flat: Tensor, key: Key) -> Tensor:
        """A view of a group's elements of a buffer of shards."""
        start, end = self._ranges[key]
        return flat[start:end]


def consecutive_ranges(numels: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """(start, end) of consecutive ranges."""
    ends = list(accumulate(numels))
    return tuple(zip([0, *ends[:-1]], ends, strict=True))
