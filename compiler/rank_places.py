"""Where a rank stands on a sharded dim."""

from meshfold.collectives import RankMesh
from meshfold.shard_tensors import Places

Digits = tuple[tuple[str, int, int], ...]
"""(axis name, blocks, unit) of every axis that shards a dim; unit as in the type: 0 but where it is
padded."""


def places_of(mesh: RankMesh, digits: Digits) -> Places:
    """The same with the number of ranks and the own place."""
    return tuple(
        (blocks, mesh.size((axis,)), mesh.coord(axis), unit) for axis, blocks, unit in digits
    )
