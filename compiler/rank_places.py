"""Where a rank stands on a sharded dim."""

from meshfold.collectives import RankMesh
from meshfold.shard_tensors import Places

Digits = tuple[tuple[str, int], ...]
"""(axis name, blocks) of every axis that shards a dim."""


def places_of(mesh: RankMesh, digits: Digits) -> Places:
    """The same with the number of ranks and the own place."""
    return tuple((blocks, mesh.size((axis,)), mesh.coord(axis)) for axis, blocks in digits)
