"""The reduction of gradients in one step: of one group, or of several in one bucket.

The groups of a bucket share a flat buffer (meshfold.zero.collective_buffers): every member packs
its gradients into its own columns. The collective starts as soon as the last member has packed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from meshfold.distributed.rank_mesh import Axes, RankMesh
from meshfold.zero.collective_buffers import CollectiveBuffer
from meshfold.zero.hierarchical_all_reduce import AllReduces, Started
from meshfold.zero.microbatch_state import Key, SharedStep
from meshfold.zero.parameter_group import GroupBuffers


@dataclass(frozen=True)
class Reducing:
    """What the reductions of a step have in common. waits_at_once: see TrainingStep."""

    mesh: RankMesh
    shared: SharedStep
    waits_at_once: bool
    all_reduces: AllReduces


class Reduction:
    """members: keys of the groups, and what copies into their buffers; alike in axes and dtype.
    on_last_microbatch: with the last microbatch, else with every one."""

    def __init__(
        self,
        of: Reducing,
        members: Sequence[tuple[Key, GroupBuffers]],
        *,
        on_last_microbatch: bool,
    ) -> None:
        self._of = of
        self._members = dict(members)
        self._key, first = members[0]
        self._on_last_microbatch = on_last_microbatch
        shard_numels = [(key, buffers.shard_numel) for key, buffers in members]
        self._buffer = CollectiveBuffer(first.num_shards, shard_numels)
        self._region = first.region
        names = of.mesh.mesh.storage.names
        group = first.group
        self._scatters = bool(group.gather)
        self._axes: Axes = tuple(names[k] for k in group.gather or group.reduce)
        self._replicas: Axes = tuple(names[k] for k in group.replicas)
        self.sums_replicas = False
        """Whether the sum over replicas is part of it: else shards wait for later microbatches."""
        self.is_started = False
        self._flat: Tensor | None = None
        self._packed: set[Key] = set()
        self._in_flight: Tensor | Started | None = None
        self._result: Tensor | None = None
        """Gradients of the shards of all members, with nothing left to communicate."""

    def pack(self, key: Key, gradients: Sequence[Tensor | None], like: Tensor) -> None:
        """Take the gradients of a member as used (None: zero); with those of the last one the
        collective starts, or they are left to a later microbatch."""
        self._of.shared.note_reached(key, gradients)
        if len(self._members) == 1 and (
            not self._on_last_microbatch or self._of.shared.is_only(self._key)
        ):
            # Only read, by the collective: autograd may have it elsewhere, too.
            whole = self._members[key].as_unsharded(gradients)
            if whole is not None:
                self._packed.add(key)
                self._start(whole)
                return
        before = self._of.shared.sum_of(self._key) if self._on_last_microbatch else None
        if self._flat is None:
            self._flat = before
        if self._flat is None:
            # Copies of parameters that are stored on the host are of another dtype.
            dtype = self._members[key].gradient_dtype
            self._flat = like.new_empty(self._buffer.numel, dtype=dtype)
        rows = self._buffer.columns(self._flat, key)
        self._members[key].write_gradients(gradients, rows, adds=before is not None)
        self._packed.add(key)
        if len(self._packed) == len(self._members):
            self._start(self._flat)

    def start_unfinished(self) -> None:
        """The backward is over: members without gradients are not waited for any longer."""
        if self._flat is not None:
            is_new = self._flat is not self._of.shared.sum_of(self._key)
            for key in self._members:
                if is_new and key not in self._packed:
                    self._buffer.columns(self._flat, key).zero_()
            self._start(self._flat)

    def finish(self, key: Key) -> list[Tensor | None] | None:
        """Gradients of a member's shards, after this collective, None for a parameter that the
        backward does not reach; None in all if there were none, or while they wait for a later
        microbatch. Once for each member."""
        self._wait()
        buffers, flat = self._members.pop(key), self._result
        if not self._members:
            self._result = None
        if flat is None or key not in self._packed:
            return None
        shards = buffers.unpack_shards(self._buffer.shards(flat, key))
        reached = self._of.shared.is_reached
        return [s if reached((*key, m)) else None for m, s in enumerate(shards)]

    def _start(self, flat: Tensor) -> None:
        self._flat = None
        self.is_started = True
        total = self._of.shared.add(self._key, flat) if self._on_last_microbatch else flat
        if total is None:
            return
        if not self._axes:
            self._result = total
            return
        self.sums_replicas = bool(self._replicas) and self._has_all_of_the_step
        if self.sums_replicas:
            self._in_flight = self._of.all_reduces.start_scattered(
                total, self._axes, self._replicas
            )
        elif self._scatters:
            self._in_flight = self._of.mesh.start_reduce_scatter(total, self._axes)
        else:
            self._in_flight = self._of.all_reduces.start(total, self._axes)
        if self._of.waits_at_once:
            self._wait()

    @property
    def _has_all_of_the_step(self) -> bool:
        """Whether no shards of earlier microbatches wait to be reduced further."""
        return self._of.shared.is_last and not any(
            self._of.shared.waits((*key, m))
            for key, buffers in self._members.items()
            for m in range(len(buffers.group.members))
        )

    def _wait(self) -> None:
        if self._in_flight is None:
            return
        self._of.mesh.place.region = self._region
        if isinstance(self._in_flight, Tensor):
            self._result = self._of.mesh.wait(self._in_flight)
        else:
            self._result = self._of.all_reduces.finish(self._in_flight)
        self._in_flight = None
