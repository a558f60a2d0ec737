"""Where a rank stands on a sharded dim."""

from torch import Tensor

from meshfold.distributed.rank_mesh import RankMesh
from meshfold.ir.mesh import DATA_AXIS
from meshfold.sharding.slicing import Places, digits_of, held_indices

Digits = tuple[tuple[str, int, int], ...]
"""(axis name, blocks, unit) of every axis that shards a dim; unit as in the type: 0 but where it is
padded."""


def places_of(mesh: RankMesh, digits: Digits) -> Places:
    """The same with the number of ranks and the own place."""
    return tuple(
        (blocks, mesh.size((axis,)), mesh.coord(axis), unit) for axis, blocks, unit in digits
    )


def places_of_microbatch(mesh: RankMesh, digits: Digits, blocks: int, parts: int) -> Places:
    """Places of the microbatch that runs on a dim of the whole batch, which has `parts` of them in
    every of `blocks` blocks. digits: on the dim of a microbatch.

    Microbatches of the global batch hold rows that follow each other; those of ranks' own parts
    lie inside these.
    """
    if mesh.cuts_own_parts:
        blocks *= mesh.size((DATA_AXIS,))
    ranks = tuple(
        (above if above < blocks else above * parts, size, own, unit)
        for above, size, own, unit in places_of(mesh, digits)
    )
    return ((blocks, parts, mesh.microbatch, 0), *ranks)


def key_heads_of(
    mesh: RankMesh, num_heads: int, digits: Digits, num_key_heads: int, key_digits: Digits
) -> Tensor:
    """The local key head of every query head that is held here, [local query heads]; of padding any
    that is there."""
    heads = held_indices(num_heads, places_of(mesh, digits), mesh.device)
    needed = (heads // (num_heads // num_key_heads)).clamp_(max=num_key_heads - 1)
    _, place = digits_of(needed, num_key_heads, places_of(mesh, key_digits))
    return place
