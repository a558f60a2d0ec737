"""Graphs of regions in micro-chunks; tests/features/test_micro_chunks.py runs them."""

import pytest

from meshfold.ir.spmd import Shard
from meshfold.passes.split.chunk_graph import ChunkingError, _Split


def test_the_dim_that_is_split_is_blocks_ranks_chunks_and_rest() -> None:
    split = _Split(Shard(1), ranks=2, chunks=3, count=36, sizes=(2,))
    assert split.shapes((4, 36, 8)) == ((4, 12, 8), (4, 2, 6, 8), (4, 2, 3, 6, 8))


def test_rows_of_a_map_that_do_not_divide_are_refused() -> None:
    """36 pixels divide over 2 ranks and 2 chunks; the 6 rows that they are of do not."""
    split = _Split(Shard(1), ranks=2, chunks=2, count=36, sizes=(2,))
    with pytest.raises(ChunkingError, match="a dim of 6 does not divide into 2 micro-chunks on 2"):
        split.shapes((4, 6, 6, 8))
