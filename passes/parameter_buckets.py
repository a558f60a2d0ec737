"""Which parameters share a bucket: those gathered over the same axes, or only reduced over the
same, of one dtype. The emitter makes buckets so, and the simulator counts their collectives so."""

from collections.abc import Sequence

from meshfold.cost_models.cost_model import CostModel
from meshfold.mesh import Mesh
from meshfold.opgraph import Value
from meshfold.passes.parameter_prices import BucketCopies, cast_s, is_bucketed, member_copies
from meshfold.spmd import REPLICATE, Layout

BucketKey = tuple[tuple[int, ...], tuple[int, ...], str, bool, str]


def bucket_copies(
    members: Sequence[tuple[Value, Layout]], gather: Sequence[int], mesh: Mesh, costs: CostModel
) -> BucketCopies:
    """Of a whole bucket. members: parameters, and how they are stored."""
    found = BucketCopies()
    for value, stored in members:
        found += member_copies(value, stored, gather, mesh, costs)
    if len(members) > 1 or not gather:
        return found
    ((value, stored),) = members
    return BucketCopies(
        cast_s(value, stored, mesh, costs) if value.master else 0.0,
        0.0 if _lies_whole(stored, gather, mesh.sizes) else found.taken_s,
        found.reduced_s,
    )


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


def bucket_key(stored: Layout, used: Layout, value: Value) -> BucketKey | None:
    """What members of one bucket have in common: (axes gathered, axes of the first reduction where
    nothing is gathered, dtype, whether trained, master dtype). None: no bucket is needed."""
    gather, reduce = changed_axes(stored, used)
    if not (gather or (reduce and value.requires_grad) or value.master):
        return None
    return gather, () if gather else reduce, value.dtype, value.requires_grad, value.master
