"""An all-gather of parameters in one step: of one group, or of several in one bucket."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from meshfold.distributed.rank_mesh import Axes, RankMesh
from meshfold.zero.collective_buffers import CollectiveBuffer
from meshfold.zero.microbatch_state import Key
from meshfold.zero.parameter_group import GroupBuffers


@dataclass(frozen=True)
class Gathered:
    """A group that takes part: its key, what copies from its buffers, and its shards as ops read
    them."""

    key: Key
    buffers: GroupBuffers
    shards: Sequence[Tensor]


class Gather:
    """An all-gather, in flight from its construction. members: alike in axes and dtype."""

    def __init__(self, mesh: RankMesh, axes: Axes, members: Sequence[Gathered]) -> None:
        first = members[0].buffers
        self._mesh = mesh
        self._left = {m.key: m.buffers for m in members}
        shard_numels = [(m.key, m.buffers.shard_numel) for m in members]
        self._buffer = CollectiveBuffer(first.num_shards, shard_numels)
        flat = first.pack_shards([shard for m in members for shard in m.shards])
        self._flat: Tensor | None = mesh.start_all_gather(flat, axes)
        self._has_arrived = False

    def take(self, key: Key) -> list[Tensor]:
        """The unsharded parameters of a group; the first call waits for all. Once for each: the
        buffer goes with the last."""
        assert self._flat is not None
        if not self._has_arrived:
            self._flat = self._mesh.wait(self._flat)
            self._has_arrived = True
        buffers = self._left.pop(key)
        rows = self._buffer.columns(self._flat, key)
        if not self._left:
            self._flat = None
        return buffers.unpack_unsharded(rows)
