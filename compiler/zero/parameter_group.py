"""Buckets: parameters of one region instance that are gathered and reduced together.

A parameter slot is *stored* in one layout and *used* by the ops in another. Where an axis goes
Shard -> Replicate (ZeRO-3) the parameter is gathered over it before use and its gradient
reduce-scattered; where it goes Invariant -> Replicate only the gradient is all-reduced. A bucket
holds the members with the same axes, dtypes and need for a gradient in one flat buffer: one
collective forward, one backward. Where ops read a parameter in a narrower dtype than it is kept in,
the bucket casts: before the gather, and gradients back before their reduction. `Bucket` is data of
the emitted region and the same for all its instances; `BucketBuffers` does the copies. No
communication here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from meshfold.ir.spmd import Layout
from meshfold.ops.registry import torch_dtype
from meshfold.sharding.layout import Assembly


@dataclass(frozen=True)
class BucketMember:
    """One use of a parameter: region slot `slot` of global `shape`. reduce: the mesh axes (indices)
    that go Invariant -> Replicate."""

    slot: int
    name: str
    shape: tuple[int, ...]
    stored: Layout
    used: Layout
    reduce: tuple[int, ...]


@dataclass(frozen=True)
class Bucket:
    """`gather`: the axes (indices, mesh order) that all members are gathered over, () for a bucket
    whose gradients are only all-reduced, or only cast; its members then share `reduce`, too. dtype:
    in which ops read the members; master: in which they are kept, if another (see Value). is_alone:
    one member, which is never gathered or reduced with those of other buckets."""

    gather: tuple[int, ...]
    dtype: str
    requires_grad: bool
    members: tuple[BucketMember, ...]
    master: str = ""
    is_alone: bool = False

    @property
    def is_made(self) -> bool:
        """Whether what ops read is made of what is kept, and dropped again."""
        return bool(self.gather or self.master)

    @property
    def reduce(self) -> tuple[int, ...]:
        """Axes of the first gradient collective of a bucket without a gather, () for none."""
        assert not self.gather
        return self.members[0].reduce


class BucketBuffers:
    """Copies between the tensors of a bucket's members and its flat buffers.

    A flat buffer of shards has shape (shard_numel,): the members' shards one after the other.
    A flat buffer of whole tensors has shape (num_shards * shard_numel,): one buffer of shards per
    rank of the gather axes, what an all-gather gives and a reduce-scatter takes.
    """

    def __init__(self, bucket: Bucket, sizes: tuple[int, ...]) -> None:
        self.bucket = bucket
        self.num_shards = math.prod(sizes[k] for k in bucket.gather)
        self.assemblies = tuple(
            Assembly(m.shape, m.stored, sizes, bucket.gather) for m in bucket.members
        )
        ends = list(accumulate(a.shard_numel for a in self.assemblies))
        self.ranges = tuple(zip([0, *ends[:-1]], ends, strict=True))
        self.shard_numel = ends[-1]

    @cached_property
    def whole_numel(self) -> int:
        """Elements of all members when gathered."""
        return self.num_shards * self.shard_numel

    def pack_shards(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Local shards -> flat buffer of shards; no copy for a single contiguous one."""
        if len(shards) == 1:
            return shards[0].reshape(-1)
        return torch.cat([s.reshape(-1) for s in shards])

    def unpack_whole(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Rows (num_shards, shard_numel), a flat buffer of whole tensors or columns of one that is
        shared -> the members, gathered. One copy each; a bucket with one member whose shards are
        consecutive in memory is a view."""
        return [
            a.whole(rows[:, start:end])
            for a, (start, end) in zip(self.assemblies, self.ranges, strict=True)
        ]

    def write_gradients(self, gradients: Sequence[torch.Tensor | None], rows: torch.Tensor) -> None:
        """Gradients of the members as used (None: zero) -> `rows` (num_shards, shard_numel), a flat
        buffer of whole tensors, or columns of one that is shared."""
        parts = zip(self.assemblies, self.ranges, gradients, strict=True)
        for assembly, (start, end), gradient in parts:
            if gradient is None:
                rows[:, start:end].zero_()
            else:
                assembly.write_stacked(gradient, rows[:, start:end])

    def as_whole(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """The gradient of the only member as a flat buffer of whole tensors, if it lies in memory
        as one does; else None."""
        (assembly, *more), (gradient, *_) = self.assemblies, gradients
        master = self.bucket.master or self.bucket.dtype
        if more or gradient is None or not (self.bucket.gather and assembly.is_view):
            return None
        if gradient.dtype != torch_dtype(master) or not gradient.is_contiguous():
            return None
        return gradient.view(-1) if gradient.numel() == self.whole_numel else None

    def unpack_shards(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Flat buffer of shards -> views of it in the members' shard shapes."""
        return [
            flat[start:end].view(a.shard_shape)
            for a, (start, end) in zip(self.assemblies, self.ranges, strict=True)
        ]
