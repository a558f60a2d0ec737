"""Slices of a dim in blocks, against indices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.graphs.layouts import cut
from support.graphs.ops import mesh_of

from meshfold.ir.spmd import Layout, Shard, is_legal
from meshfold.sharding.slicing import (
    check_indices,
    local_indices,
    local_row,
    local_runs,
    locate_indices,
    num_valid_rows,
    shard,
    stacked_shards,
    unstacked_shards,
    zero_padded,
)

GENERATOR = torch.Generator()
X = torch.arange(2 * 72 * 3, dtype=torch.float64).reshape(2, 72, 3)


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_parts_are_those_of_the_type(blocks: int, num_parts: int) -> None:
    expected = cut(X, (Shard(1, blocks),), mesh_of(num_parts), GENERATOR)
    stacked = stacked_shards(X, 1, blocks, num_parts)
    padded = torch.zeros_like(X)
    for r in range(num_parts):
        assert shard(X, 1, blocks, num_parts, r).equal(expected[r])
        assert stacked[r].equal(expected[r])
        padded += zero_padded(expected[r], 1, blocks, num_parts, r)
    assert stacked.is_contiguous()
    assert unstacked_shards(stacked, 1, blocks).equal(X)
    assert padded.equal(X)


shards = st.builds(Shard, st.just(0), st.sampled_from([1, 2, 3, 4, 6]))


@given(st.tuples(shards, shards))
def test_digits_find_what_several_axes_hold(layout: Layout) -> None:
    mesh, size = mesh_of(2, 3), 72
    if not is_legal((size,), layout, mesh.sizes):
        return
    index = torch.arange(size)
    for rank, expected in enumerate(cut(index, layout, mesh, GENERATOR)):
        coords = mesh.coords(rank)
        pairs = zip(layout, mesh.sizes, coords, strict=True)
        digits = tuple((t.blocks, n, c, t.unit) for t, n, c in pairs)
        assert local_indices(size, digits, torch.device("cpu")).equal(expected)
        runs = local_runs(size, digits)
        assert [
            i for first, count in runs for i in range(first, first + count)
        ] == expected.tolist()
        assert all(sum(a) < b[0] for a, b in zip(runs, runs[1:], strict=False))
        held, local = locate_indices(index, size, digits)
        assert index[held].equal(expected)
        assert local[held].equal(torch.arange(len(expected)))
        assert int(local.max()) < len(expected)
        for row in range(size):
            assert local_row(row, size, digits) == (int(local[row]) if held[row] else None)


@given(
    blocks=st.integers(1, 3),
    units=st.integers(1, 6),
    unit=st.integers(1, 3),
    num_parts=st.integers(1, 4),
)
def test_digits_of_padded_units(blocks: int, units: int, unit: int, num_parts: int) -> None:
    size = blocks * units * unit
    index = torch.arange(size)
    seen = []
    for own in range(num_parts):
        places = ((blocks, num_parts, own, unit),)
        found = local_indices(size, places, torch.device("cpu"))
        held, local = locate_indices(index, size, places)
        assert found[local[held]].equal(index[held])
        assert int(held.sum()) == blocks * num_valid_rows(size, places)
        assert len(found) == blocks * unit * -(-units // num_parts)
        for row in range(size):
            assert local_row(row, size, places) == (int(local[row]) if held[row] else None)
        seen.append(index[held])
    assert torch.cat(seen).sort().values.equal(index)


@pytest.mark.parametrize("index", [-1, 12, 1 << 40])
def test_an_index_beyond_the_unsharded_dim_is_refused_as_torch_does(index: int) -> None:
    check_indices(torch.tensor([[0, 11]]), 12, "class")
    check_indices(torch.empty(0, dtype=torch.int64), 12, "class")
    check_indices(torch.empty(3, dtype=torch.int64, device="meta"), 12, "class")
    with pytest.raises(IndexError, match=f"class {index} is not one of 12"):
        check_indices(torch.tensor([[0, index]]), 12, "class")
