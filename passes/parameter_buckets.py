"""Which parameters share a bucket: those gathered over the same axes, or only reduced over the
same, of one dtype. The emitter makes buckets so, and the simulator counts their collectives so."""

from meshfold.opgraph import Value
from meshfold.spmd import Layout

BucketKey = tuple[tuple[int, ...], tuple[int, ...], str, bool, str]


def changed_axes(stored: Layout, used: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(axes gathered, axes only reduced) between the two layouts of a member."""
    pairs = list(enumerate(zip(stored, used, strict=True)))
    gather = tuple(k for k, (s, u) in pairs if s != u and s.is_shard)
    reduce = tuple(k for k, (s, u) in pairs if s != u and not s.is_shard)
    return gather, reduce


def bucket_key(stored: Layout, used: Layout, value: Value) -> BucketKey | None:
    """What members of one bucket have in common: (axes gathered, axes of the first reduction where
    nothing is gathered, dtype, whether trained, master dtype). None: no bucket is needed."""
    gather, reduce = changed_axes(stored, used)
    if not (gather or (reduce and value.requires_grad) or value.master):
        return None
    return gather, () if gather else reduce, value.dtype, value.requires_grad, value.master
