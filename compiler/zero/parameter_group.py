"""Parameter groups: parameters of one region instance that are gathered and reduced together
(FSDP2's FSDPParamGroup).

A parameter slot is *stored* in one layout and *used* by the ops in another. Where an axis goes
Shard -> Replicate (ZeRO-3) the parameter is gathered over it before use and its gradient
reduce-scattered; where it goes Invariant -> Replicate only the gradient is all-reduced. A group
has members with the same axes, dtypes and need for a gradient in one flat buffer: one collective
forward, one backward. Where ops read a parameter in a narrower dtype than it is stored in, the
group casts: before the gather, and gradients back before their reduction. A ParameterGroup is data
of the emitted region and the same for all its instances; GroupBuffers does the copies. No
communication here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from meshfold.ir.spmd import Layout
from meshfold.sharding.layout import Assembly
from meshfold.torch_compat.dtypes import torch_dtype
from meshfold.zero.collective_buffers import consecutive_ranges


@dataclass(frozen=True)
class GroupMember:
    """One use of a parameter: region slot `slot` of global `shape`. reduce: the mesh axes (indices)
    that go Invariant -> Replicate."""

    slot: int
    name: str
    shape: tuple[int, ...]
    stored: Layout
    used: Layout
    reduce: tuple[int, ...]


@dataclass(frozen=True)
class ParameterGroup:
    """The members, and what they have in common. Axes and layouts are on the storage mesh
    (meshfold.ir.mesh)."""

    gather: tuple[int, ...]
    """Axes (indices, mesh order) that all members are gathered over; () for a group whose gradients
    are only all-reduced, or only cast: its members then share `reduce`, too."""
    dtype: str
    """The dtype in which ops read the members."""
    requires_grad: bool
    members: tuple[GroupMember, ...]
    master: str = ""
    """The dtype in which the members are stored, if another (see Value)."""
    is_unbucketed: bool = False
    """One member, with collectives of its own: never coalesced with those of other groups."""
    replicas: tuple[int, ...] = ()
    """The axis over which scattered gradients are all-reduced right behind, with those of all
    members: dp_replicate under HSDP."""

    @property
    def is_materialized(self) -> bool:
        """Whether ops read temporary tensors, gathered or cast from what is stored."""
        return bool(self.gather or self.master)

    @property
    def reduce(self) -> tuple[int, ...]:
        """Axes of the first gradient collective of a group without a gather, () for none."""
        assert not self.gather
        return self.members[0].reduce

    def left_axes(self, member: int, sums_replicas: bool) -> tuple[int, ...]:
        """Axes that scattered gradients of a member are still to be reduced over. sums_replicas:
        whether they are summed over replicas."""
        done = self.replicas if sums_replicas else ()
        return tuple(k for k in self.members[member].reduce if k not in done)


class GroupBuffers:
    """Copies between the tensors of a group's members and its flat buffers.

    A flat buffer of shards has shape (shard_numel,): the members' shards one after the other.
    A flat buffer of unsharded tensors has shape (num_shards * shard_numel,): one buffer of shards
    per rank of the gather axes, what an all-gather gives and a reduce-scatter takes. region: its
    name, for errors.
    """

    def __init__(self, group: ParameterGroup, sizes: tuple[int, ...], region: str = "") -> None:
        self.group = group
        self.region = region
        self.num_shards = math.prod(sizes[k] for k in group.gather)
        self.assemblies = tuple(
            Assembly(m.shape, m.stored, sizes, group.gather) for m in group.members
        )
        self.ranges = consecutive_ranges(a.shard_numel for a in self.assemblies)
        self.shard_numel = self.ranges[-1][1]

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Of gradients while they are reduced, and of what is stored."""
        return torch_dtype(self.group.master or self.group.dtype)

    @cached_property
    def unsharded_numel(self) -> int:
        """Elements of all members when gathered."""
        return self.num_shards * self.shard_numel

    def pack_shards(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Local shards -> flat buffer of shards; no copy for a single contiguous one."""
        if len(shards) == 1:
            return shards[0].reshape(-1)
        return torch.cat([s.reshape(-1) for s in shards])

    def unpack_unsharded(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Rows (num_shards, shard_numel), a flat buffer of unsharded tensors or columns of one that
        is shared -> the members, gathered. One copy each; a group with one member whose shards are
        consecutive in memory is a view."""
        return [
            a.gathered(rows[:, start:end])
            for a, (start, end) in zip(self.assemblies, self.ranges, strict=True)
        ]

    def write_gradients(
        self,
        gradients: Sequence[torch.Tensor | None],
        rows: torch.Tensor,
        *,
        adds: bool = False,
    ) -> None:
        """Gradients of the members as used (None: zero) -> `rows` (num_shards, shard_numel), a flat
        buffer of unsharded tensors, or columns of one that is shared. adds: to what is there, else
        in its place."""
        members = zip(self.assemblies, self.ranges, gradients, strict=True)
        for assembly, (start, end), gradient in members:
            if gradient is not None:
                assembly.write_stacked(gradient, rows[:, start:end], adds=adds)
            elif not adds:
                rows[:, start:end].zero_()

    def as_unsharded(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """The gradient of the only member as a flat buffer of unsharded tensors, if it lies in
        memory as one does; else None."""
        (assembly, *more), (gradient, *_) = self.assemblies, gradients
        if more or gradient is None or not (self.group.gather and assembly.is_view):
            return None
        if gradient.dtype != self.gradient_dtype or not gradient.is_contiguous():
            return None
        return gradient.view(-1) if gradient.numel() == self.unsharded_numel else None

    def unpack_shards(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Flat buffer of shards -> views of it in the members' shard shapes."""
        return [
            flat[start:end].view(a.shard_shape)
            for a, (start, end) in zip(self.assemblies, self.ranges, strict=True)
        ]
