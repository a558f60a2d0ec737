"""Where a rank stands on a sharded dim."""

from torch import Tensor

from meshfold.distributed.rank_mesh import RankMesh
from meshfold.distributed.step_context import StepContext
from meshfold.ir.mesh import DATA_AXIS
from meshfold.sharding.slicing import ShardIndices, local_indices, locate_indices

ShardDigits = tuple[tuple[str, int, int], ...]
"""(axis name, blocks, granularity) of every axis that shards a dim; the granularity as in the type:
0 but where it is padded."""


def shard_indices_of(mesh: RankMesh, digits: ShardDigits) -> ShardIndices:
    """The same with the number of ranks and the shard index of this one."""
    return tuple(
        (blocks, mesh.size((axis,)), mesh.coord(axis), granularity)
        for axis, blocks, granularity in digits
    )


def shard_indices_of_microbatch(
    context: StepContext, digits: ShardDigits, blocks: int, num_microbatches: int
) -> ShardIndices:
    """Shard indices of the microbatch that runs on a dim of the global batch, which has
    `num_microbatches` in each of `blocks` blocks. digits: on the dim of a microbatch.

    Microbatches of the global batch are consecutive rows; those of a rank's slice of the batch lie
    inside that slice.
    """
    if context.slices_own_batch:
        blocks *= context.mesh.size((DATA_AXIS,))
    ranks = tuple(
        (above if above < blocks else above * num_microbatches, size, index, granularity)
        for above, size, index, granularity in shard_indices_of(context.mesh, digits)
    )
    return ((blocks, num_microbatches, context.microbatch, 0), *ranks)


def key_heads_of(
    mesh: RankMesh, num_heads: int, digits: ShardDigits, num_key_heads: int, key_digits: ShardDigits
) -> Tensor:
    """The local key head of every local query head, [local query heads]; of padding any that is
    there."""
    heads = local_indices(num_heads, shard_indices_of(mesh, digits), mesh.device)
    needed = (heads // (num_heads // num_key_heads)).clamp_(max=num_key_heads - 1)
    _, local = locate_indices(needed, num_key_heads, shard_indices_of(mesh, key_digits))
    return local
