"""An all-gather of parameters in one step: of one bucket, or of several that are merged."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from meshfold.distributed.rank_mesh import Axes, RankMesh
from meshfold.zero.microbatch_state import Key
from meshfold.zero.parameter_group import BucketBuffers


@dataclass(frozen=True)
class Gathered:
    """A bucket that takes part: its key, what copies from its buffers, and its shards as ops read
    them."""

    key: Key
    buffers: BucketBuffers
    shards: Sequence[Tensor]


class Gather:
    """On its way from when it is made. members: alike in axes and dtype."""

    def __init__(self, mesh: RankMesh, axes: Axes, members: Sequence[Gathered]) -> None:
        first = members[0].buffers
        ends = list(accumulate(m.buffers.shard_numel for m in members))
        ranges = zip([0, *ends[:-1]], ends, strict=True)
        self._mesh = mesh
        self._num_shards = first.num_shards
        self._columns = {
            m.key: (m.buffers, start, end) for m, (start, end) in zip(members, ranges, strict=True)
        }
        flat = first.pack_shards([shard for m in members for shard in m.shards])
        self._flat: Tensor | None = mesh.start_all_gather(flat, axes)
        self._is_there = False

    def take(self, key: Key) -> list[Tensor]:
        """The parameters of a bucket, whole; the first to come waits for all. Once for each: the
        buffer goes with the last."""
        assert self._flat is not None
        if not self._is_there:
            self._flat = self._mesh.wait(self._flat)
            self._is_there = True
        buffers, start, end = self._columns.pop(key)
        rows = self._flat.view(self._num_shards, -1)[:, start:end]
        if not self._columns:
            self._flat = None
        return buffers.unpack_whole(rows)
