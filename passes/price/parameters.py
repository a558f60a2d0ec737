"""What a parameter costs between its stored layout and the layout that ops read.

On one axis                                                               handled by
    same type        free
    I -> R           gradient all-reduce                                  runtime, in groups
    S -> R           gather, a second one in backward, gradient           runtime, in groups
                     reduce-scatter
    I -> S, I -> P   in-graph conversion                                  emitted graph
    S -> I           in-graph gather                                      emitted graph

On DATA and CONTEXT axes (passes/region/roles.py) parameters are used unsharded, so the used type
is I or R; on every other axis a stored shard is used as it is. One collective carries the whole
parameter group: a parameter is charged its share of the bytes, without start-up latency, and
nothing where the degree decides (EXPERT axes, too).

A group has a flat buffer for its collective, and its members are copied into and out of it:

    before a gather     shards cast to what ops read, where they are stored in another dtype;
                        several are put one after the other
    after it            every member out of the shards of all ranks, unless it is contiguous there:
                        the only one, sharded along its first dim
    before a reduction  every gradient into the buffer, cast to what parameters are stored in
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshfold.cost_models.op_costs.optimizers import Update, update_of
from meshfold.ir.op_graph import ITEM_BYTES, Value
from meshfold.ir.spmd import Layout, SpmdType, local_shape
from meshfold.passes.price.conversions import ConversionCosts

BUCKET_BYTES = 25 << 20
"""Bytes of a bucket, for the price of a byte in it: the default of DistributedDataParallel."""


def stored_bytes(value: Value, layout: Layout, sizes: Sequence[int]) -> int:
    """Bytes of a parameter on one rank in the dtype that it is stored in, and of its gradient while
    and after it is reduced."""
    return widening(value) * local_bytes(value, layout, sizes)


def local_update(value: Value, layout: Layout, sizes: Sequence[int], optimizer: str) -> Update:
    """What the optimizer keeps and does for a parameter on one rank."""
    shape = local_shape(value.shape, layout, sizes)
    item_bytes = ITEM_BYTES[value.stored_dtype]
    return update_of(optimizer, shape, stored_bytes(value, layout, sizes), item_bytes)


def copy_bytes(value: Value, layout: Layout, sizes: Sequence[int], *, is_tied: bool) -> int:
    """Bytes on one rank of the device's copy of a parameter that the host stores
    (meshfold.offload.copies): in the dtype that ops read, but where several uses read it."""
    return (stored_bytes if is_tied else local_bytes)(value, layout, sizes)


def widening(value: Value) -> int:
    """Bytes of an element as it is stored over those as ops read it."""
    return ITEM_BYTES[value.stored_dtype] // ITEM_BYTES[value.dtype]


def local_bytes(value: Value, layout: Layout, sizes: Sequence[int]) -> int:
    """Bytes of a value on one rank, in the dtype that ops read."""
    shards = 1
    for t, size in zip(layout, sizes, strict=True):
        if t.padded:
            return math.prod(local_shape(value.shape, layout, sizes)) * ITEM_BYTES[value.dtype]
        if t.is_shard:
            shards *= t.num_shards(size)
    return value.num_bytes // shards


def is_grouped(source: SpmdType, target: SpmdType) -> bool:
    """Whether the runtime, not the graph, does this conversion of a parameter on one axis."""
    return target.kind == "R" and source.kind in ("I", "S")


def cast_s(value: Value, stored: Layout, costs: ConversionCosts) -> float:
    """Seconds to cast a rank's shard of a parameter to what ops read, in a kernel of several."""
    moved = sum(size(value, stored, costs.mesh.sizes) for size in (local_bytes, stored_bytes))
    return costs.compute_s(0.0, moved, value.dtype) - costs.launch_s


@dataclass(frozen=True, slots=True)
class GroupCopies:
    """Seconds of kernels on one rank: before each gather (or cast) of a group, after each gather,
    and before the reduction of its gradients."""

    packed_s: float = 0.0
    unpacked_s: float = 0.0
    reduced_s: float = 0.0

    @property
    def gathered_s(self) -> float:
        """Around one gather."""
        return self.packed_s + self.unpacked_s

    def __add__(self, other: "GroupCopies") -> "GroupCopies":
        return GroupCopies(
            self.packed_s + other.packed_s,
            self.unpacked_s + other.unpacked_s,
            self.reduced_s + other.reduced_s,
        )

    def __sub__(self, other: "GroupCopies") -> "GroupCopies":
        return GroupCopies(
            self.packed_s - other.packed_s,
            self.unpacked_s - other.unpacked_s,
            self.reduced_s - other.reduced_s,
        )


def member_copies(
    value: Value,
    stored: Layout,
    gather: Sequence[int],
    costs: ConversionCosts,
) -> GroupCopies:
    """Copies of a parameter that is one of several in a group. gather: axes it is gathered over."""
    sizes = costs.mesh.sizes
    here, stored_here = (size(value, stored, sizes) for size in (local_bytes, stored_bytes))
    shards = math.prod(sizes[k] for k in gather)
    packed_s = unpacked_s = reduced_s = 0.0
    if value.master:
        packed_s += cast_s(value, stored, costs)
    if gather:
        # One kernel for the whole group; a parameter without elements (MobileBERT) has none.
        packed_s += max(0.0, costs.compute_s(0.0, 2 * here, value.dtype) - costs.launch_s)
        unpacked_s = costs.compute_s(0.0, 2 * shards * here, value.dtype)
    if value.requires_grad:
        reduced_s = costs.compute_s(0.0, shards * (here + stored_here), value.dtype)
    return GroupCopies(packed_s, unpacked_s, reduced_s)
