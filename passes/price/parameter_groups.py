"""Which parameters share a bucket: those gathered over the same axes, or only reduced over the
same, of one dtype. The emitter makes buckets so, and the simulator counts their collectives so."""

from collections.abc import Sequence

from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import Value
from meshfold.ir.spmd import REPLICATE, Layout
from meshfold.passes.price.conversions import ConversionCosts
from meshfold.passes.region.parameter_tables import BucketCopies, cast_s, is_bucketed, member_copies

Alone = tuple[int, Layout]
"""Slot and used layout of a parameter that has a bucket of its own: read in two, it has two."""
BucketKey = tuple[tuple[int, ...], tuple[int, ...], str, bool, str, Alone | None]


def has_own_bucket(
    value: Value, stored: Layout, gather: Sequence[int], mesh: Mesh, costs: ConversionCosts
) -> bool:
    """Whether a parameter is gathered, and its gradient scattered, alone: the parts of all ranks
    are then the parameter as ops read it, and the gradient is what is reduced. That saves copies
    into and out of a buffer that it would share, and costs the start and the latencies of
    collectives of its own."""
    if not (gather and _lies_whole(stored, gather, mesh.sizes)):
        return False
    shared = member_copies(value, stored, gather, mesh, costs)
    alone = _copies_alone(value, stored, gather, mesh, costs)
    kinds = ("all_gather", "all_gather", "reduce_scatter")[: 3 if value.requires_grad else 2]
    added_s = sum(costs.collective_s(kind, 1, tuple(gather)) for kind in kinds)
    return 2 * (shared - alone).gathered_s + (shared - alone).reduced_s > added_s


def parameter_copies(
    value: Value, stored: Layout, gather: Sequence[int], mesh: Mesh, costs: ConversionCosts
) -> BucketCopies:
    """Of one parameter, in a bucket of its own or one that it shares."""
    if has_own_bucket(value, stored, gather, mesh, costs):
        return _copies_alone(value, stored, gather, mesh, costs)
    return member_copies(value, stored, gather, mesh, costs)


def bucket_copies(
    members: Sequence[tuple[Value, Layout]],
    gather: Sequence[int],
    mesh: Mesh,
    costs: ConversionCosts,
) -> BucketCopies:
    """Of a whole bucket. members: parameters, and how they are stored."""
    if len(members) == 1:
        ((value, stored),) = members
        return _copies_alone(value, stored, gather, mesh, costs)
    found = BucketCopies()
    for value, stored in members:
        found += member_copies(value, stored, gather, mesh, costs)
    return found


def _copies_alone(
    value: Value, stored: Layout, gather: Sequence[int], mesh: Mesh, costs: ConversionCosts
) -> BucketCopies:
    """Of the only member of a bucket: nothing to pack, and what lies whole is not copied but where
    its gradient is cast. What is all-reduced is, since that writes into it."""
    found = member_copies(value, stored, gather, mesh, costs)
    cast = cast_s(value, stored, mesh, costs) if value.master else 0.0
    if not (gather and _lies_whole(stored, gather, mesh.sizes)):
        return BucketCopies(cast, found.taken_s, found.reduced_s)
    return BucketCopies(cast, 0.0, found.reduced_s if value.master else 0.0)


def _lies_whole(stored: Layout, gather: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether the parts of all ranks, one after the other, are the parameter as it is read: cut
    along its first dim by the axes that it is gathered over, the first one outermost."""
    blocks = 1
    for k in gather:
        if stored[k].dim != 0 or stored[k].padded or stored[k].blocks != blocks:
            return False
        blocks *= sizes[k]
    return all(t.dim != 0 for k, t in enumerate(stored) if k not in gather)


def changed_axes(stored: Layout, used: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(axes gathered, axes only reduced) between the two layouts of a member."""
    pairs = list(enumerate(zip(stored, used, strict=True)))
    gather = tuple(k for k, (s, u) in pairs if s != u and s.is_shard)
    reduce = tuple(k for k, (s, u) in pairs if s != u and not s.is_shard)
    return gather, reduce


def used_layout(stored: Layout, demand: Layout, mesh: Mesh) -> Layout:
    """What the bucket makes of a parameter in layout `stored` for an op that reads `demand`: the
    axes that go to Replicate from Invariant or Shard are done. The rest is converted in the graph.
    """
    return tuple(
        REPLICATE if is_bucketed(s, d) and n > 1 else s
        for s, d, n in zip(stored, demand, mesh.sizes, strict=True)
    )


def bucket_key(
    v: int, value: Value, stored: Layout, used: Layout, mesh: Mesh, costs: ConversionCosts
) -> BucketKey | None:
    """What members of one bucket have in common: (axes gathered, axes of the first reduction where
    nothing is gathered, dtype, whether trained, master dtype, who it is where it is alone in its
    bucket). None: no bucket is needed. v: the slot of the parameter."""
    gather, reduce = changed_axes(stored, used)
    if not (gather or (reduce and value.requires_grad) or value.master):
        return None
    alone = (v, used) if has_own_bucket(value, stored, gather, mesh, costs) else None
    trained = value.requires_grad
    return gather, () if gather else reduce, value.dtype, trained, value.master, alone
