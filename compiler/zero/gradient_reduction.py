"""The reduction of gradients in one step: of one bucket, or of several that are merged.

Merged ones share a flat buffer: what the collective takes has a row per rank of the gather axes,
and every member packs its gradients into its own columns, as a bucket does with its parameters. It
is on its way as soon as the last member has packed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from meshfold.distributed.rank_mesh import Axes, RankMesh
from meshfold.zero.hierarchical_all_reduce import AllReduces, Started
from meshfold.zero.microbatch_state import Key, SharedStep
from meshfold.zero.parameter_group import BucketBuffers


@dataclass(frozen=True)
class Reducing:
    """What the reductions of a step have in common. waits_at_once: see TrainingStep."""

    mesh: RankMesh
    shared: SharedStep
    waits_at_once: bool
    all_reduces: AllReduces


class Reduction:
    """members: keys of the buckets, and what copies into their buffers; alike in axes and dtype.
    is_late: with the last microbatch, else with every one."""

    def __init__(
        self, of: Reducing, members: Sequence[tuple[Key, BucketBuffers]], *, is_late: bool
    ) -> None:
        self._of = of
        self._members = dict(members)
        self._key, first = members[0]
        self._is_late = is_late
        self._num_shards = first.num_shards
        ends = list(accumulate(buffers.shard_numel for _, buffers in members))
        ranges = zip([0, *ends[:-1]], ends, strict=True)
        self._ranges = dict(zip(self._members, ranges, strict=True))
        self._shard_numel = ends[-1]
        names = of.mesh.mesh.names
        bucket = first.bucket
        self._scatters = bool(bucket.gather)
        self._axes: Axes = tuple(names[k] for k in bucket.gather or bucket.reduce)
        self._flat: Tensor | None = None
        self._packed: set[Key] = set()
        self._in_flight: Tensor | Started | None = None
        self._result: Tensor | None = None
        """Gradients of the shards of all members, with nothing left to communicate."""

    def pack(self, key: Key, gradients: Sequence[Tensor | None], like: Tensor) -> None:
        """Take the gradients of a member as used (None: zero); with those of the last one the
        collective starts, or they are left to a later microbatch."""
        if len(self._members) == 1 and (not self._is_late or self._of.shared.is_only(self._key)):
            # Only read, by the collective: autograd may have it elsewhere, too.
            whole = self._members[key].as_whole(gradients)
            if whole is not None:
                self._packed.add(key)
                self._start(whole)
                return
        if self._flat is None:
            self._flat = like.new_empty(self._num_shards * self._shard_numel)
        self._members[key].write_gradients(gradients, self._columns(self._flat, key))
        self._packed.add(key)
        if len(self._packed) == len(self._members):
            self._start(self._flat)

    def start_unfinished(self) -> None:
        """The backward is over: members without gradients are not waited for any longer."""
        if self._flat is not None:
            for key in self._members:
                if key not in self._packed:
                    self._columns(self._flat, key).zero_()
            self._start(self._flat)

    def finish(self, key: Key) -> list[Tensor] | None:
        """Gradients of a member's shards, after this collective; None if there were none, or while
        they wait for a later microbatch. Once for each member."""
        self._wait()
        buffers, flat = self._members.pop(key), self._result
        if not self._members:
            self._result = None
        if flat is None or key not in self._packed:
            return None
        start, end = self._ranges[key]
        return buffers.unpack_shards(flat[start:end])

    def _columns(self, flat: Tensor, key: Key) -> Tensor:
        start, end = self._ranges[key]
        return flat.view(self._num_shards, self._shard_numel)[:, start:end]

    def _start(self, flat: Tensor) -> None:
        self._flat = None
        if not self._axes:
            self._result = flat
            return
        total = self._of.shared.add(self._key, flat) if self._is_late else flat
        if total is None:
            return
        if self._scatters:
            self._in_flight = self._of.mesh.start_reduce_scatter(total, self._axes)
        else:
            self._in_flight = self._of.all_reduces.start(total, self._axes)
        if self._of.waits_at_once:
            self._wait()

    def _wait(self) -> None:
        if self._in_flight is None:
            return
        if isinstance(self._in_flight, Tensor):
            self._result = self._of.mesh.wait(self._in_flight)
        else:
            self._result = self._of.all_reduces.finish(self._in_flight)
        self._in_flight = None
