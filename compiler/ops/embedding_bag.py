"""The op meshfold::embedding_bag: rows of a table, summed, averaged or maximized by bag.

    out[b] = sum, mean or maximum over i of bag b of weights[b, i] * table[ids[b, i]]

Bags are the rows of ids [b, l], or the runs of ids [n] that offsets [b] begin. A bag without rows
is zero. Capture writes torch's embedding_bag with it (meshfold.capture.rewrites.embedding_bag),
which returns what it found beside the result, and knows flat ids only. Importing this defines the
op.
"""

import torch
from torch import Tensor
from torch.nn import functional

from meshfold.distributed.step_context import StepContext
from meshfold.sharding.indices import ShardDigits, shard_indices_of
from meshfold.sharding.slicing import check_indices, locate_indices

MODES = ("sum", "mean", "max")
"""By the number that torch has for them."""


def bags(
    table: Tensor,
    ids: Tensor,
    offsets: Tensor | None = None,
    weights: Tensor | None = None,
    mode: int = 0,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Tensor:
    """table [v, o] -> [b, o]. weights: as ids, of a sum only. include_last_offset: offsets [b + 1]
    tell the end of the last bag, too. padding_idx: a row that no bag counts, -1 for none."""
    return functional.embedding_bag(
        ids,
        table,
        offsets,
        mode=MODES[mode],
        per_sample_weights=weights,
        include_last_offset=include_last_offset,
        padding_idx=padding_idx if padding_idx >= 0 else None,
    )


torch.library.define(
    "meshfold::embedding_bag",
    "(Tensor table, Tensor ids, Tensor? offsets=None, Tensor? weights=None, int mode=0, "
    "bool include_last_offset=False, int padding_idx=-1) -> Tensor",
)
torch.library.impl("meshfold::embedding_bag", "CompositeImplicitAutograd", bags)


def local_bags(
    context: StepContext,
    table: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    mode: int,
    include_last_offset: bool,
    padding_idx: int,
    num_rows: int,
    digits: ShardDigits,
) -> Tensor:
    """Bags of a table [num_rows, o] of which this rank has a shard of the rows: its summand, over
    the axes of `digits`, of their sums or means. A mean divides by how many rows of a bag count on
    all ranks together."""
    check_indices(ids, num_rows, "embedding index")
    is_local, rows = locate_indices(ids, num_rows, shard_indices_of(context.mesh, digits))
    counts = ids != padding_idx
    kept = (is_local & counts).to(table.dtype)
    kept = kept if weights is None else kept * weights
    total = bags(table, rows, offsets, kept, 0, include_last_offset)
    if MODES[mode] == "sum":
        return total
    one = table.new_ones((1, 1))
    nowhere = torch.zeros_like(ids)
    sizes = bags(one, nowhere, offsets, counts.to(table.dtype), 0, include_last_offset)
    return total / sizes.clamp(min=1)
