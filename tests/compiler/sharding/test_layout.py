"""Shards against index-by-index cutting, and the way back."""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.graphs.layouts import cut

from meshfold.ir.mesh import Mesh, MeshAxis
from meshfold.ir.spmd import (
    INVARIANT,
    REPLICATE,
    Layout,
    PaddedShard,
    Shard,
    is_legal,
    local_shape,
    parse_layout,
)
from meshfold.sharding.layout import Assembly, cropped, shard_of, valid_shape

SHAPE = (24, 12)
TYPES = [INVARIANT, *(Shard(d, b) for d in (0, 1) for b in (1, 2, 3, 6))]


def mesh_of(*sizes: int) -> Mesh:
    return Mesh(tuple(MeshAxis(name, n) for name, n in zip("abc", sizes, strict=False)))


def legal_layouts(mesh: Mesh) -> Iterator[Layout]:
    for layout in itertools.product(TYPES, repeat=len(mesh.axes)):
        if is_legal(SHAPE, layout, mesh.sizes):
            yield layout


@pytest.mark.parametrize("mesh", [mesh_of(2), mesh_of(2, 3), mesh_of(2, 2, 1)], ids=str)
def test_shard_of_is_the_slice_by_indices(mesh: Mesh) -> None:
    x = torch.arange(24.0 * 12).reshape(SHAPE)
    for layout in legal_layouts(mesh):
        expected = cut(x, layout, mesh, torch.Generator())
        for rank in range(mesh.num_ranks):
            part = shard_of(x, layout, mesh.sizes, mesh.coords(rank))
            assert torch.equal(part, expected[rank]), layout


@pytest.mark.parametrize("mesh", [mesh_of(2), mesh_of(2, 3)], ids=str)
def test_assembly_puts_shards_together_and_takes_them_apart(mesh: Mesh) -> None:
    x = torch.arange(24.0 * 12).reshape(SHAPE)
    for layout in legal_layouts(mesh):
        shards = cut(x, layout, mesh, torch.Generator())
        sharded = [k for k, t in enumerate(layout) if t.is_shard]
        for count in range(1, len(sharded) + 1):
            for gather in itertools.combinations(sharded, count):
                check_assembly(x, layout, mesh, shards, gather)


def check_assembly(
    x: torch.Tensor, layout: Layout, mesh: Mesh, shards: list[torch.Tensor], gather: tuple[int, ...]
) -> None:
    assembly = Assembly(SHAPE, layout, mesh.sizes, gather)
    used = tuple(REPLICATE if k in gather else t for k, t in enumerate(layout))
    wholes = cut(x, used, mesh, torch.Generator())
    names = tuple(mesh.names[k] for k in gather)
    for group in mesh.groups(names):
        stacked = torch.stack([shards[r].reshape(-1) for r in group])
        whole = assembly.gathered(stacked)
        assert torch.equal(whole, wholes[group[0]])
        if assembly.is_view:
            assert whole.data_ptr() == stacked.data_ptr()
        back = torch.zeros_like(stacked)
        assembly.write_stacked(whole, back)
        assert torch.equal(back, stacked)


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 3)),
    data=st.data(),
)
def test_padded_shards_are_equal_chunks_and_gather_to_the_full_tensor(
    shape: tuple[int, ...], sizes: tuple[int, int], data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    others = [d for d, size in enumerate(shape) if d != dim and size % sizes[1] == 0]
    other = Shard(data.draw(st.sampled_from(others))) if others else INVARIANT
    layout = (PaddedShard(dim), other)
    assert is_legal(shape, layout, sizes)
    mesh = mesh_of(*sizes)
    x = torch.randn(shape)
    shards = [shard_of(x, layout, sizes, mesh.coords(r)) for r in range(mesh.num_ranks)]
    for rank, shard in enumerate(shards):
        coords = mesh.coords(rank)
        held = valid_shape(shape, layout, sizes, coords)
        local = x if other == INVARIANT else x.chunk(sizes[1], other.dim)[coords[1]]
        chunks = local.chunk(sizes[0], dim)  # torch's uneven chunks, as DTensor cuts them
        if coords[0] < len(chunks):
            assert torch.equal(cropped(shard, held), chunks[coords[0]])
        else:
            assert math.prod(held) == 0
        assert shard.shape == local_shape(shape, layout, sizes)
        assert shard.abs().sum() == pytest.approx(cropped(shard, held).abs().sum())
    assembly = Assembly(shape, layout, sizes, (0,))
    for group in mesh.groups(("a",)):
        stacked = torch.stack([shards[r].reshape(-1) for r in group])
        whole = assembly.gathered(stacked)
        assert torch.equal(whole, shard_of(x, (INVARIANT, other), sizes, mesh.coords(group[0])))
        back = torch.ones_like(stacked)
        assembly.write_stacked(whole, back)
        assert torch.equal(back, stacked)


@given(
    blocks=st.integers(1, 3),
    units=st.integers(1, 6),
    unit=st.integers(1, 3),
    size=st.integers(1, 4),
)
def test_units_of_padded_blocks_stay_whole_and_come_back(
    blocks: int, units: int, unit: int, size: int
) -> None:
    """Rows are numbered from 1: zeros are padding."""
    shape = (2, blocks * units * unit)
    x = 1.0 + torch.arange(2.0 * shape[1]).view(shape)
    layout = (PaddedShard(1, blocks, unit),)
    each = -(-units // size)
    shards = [shard_of(x, layout, (size,), (r,)) for r in range(size)]
    for r, shard in enumerate(shards):
        assert shard.shape == local_shape(shape, layout, (size,)) == (2, blocks * each * unit)
        held = x.view(2, blocks, units * unit)[:, :, r * each * unit : (r + 1) * each * unit]
        by_block = shard.view(2, blocks, each * unit)
        assert torch.equal(by_block[:, :, : held.shape[2]], held)
        assert not by_block[:, :, held.shape[2] :].any()
    assembly = Assembly(shape, layout, (size,), (0,))
    stacked = torch.stack([shard.reshape(-1) for shard in shards])
    assert torch.equal(assembly.gathered(stacked), x)
    back = torch.ones_like(stacked)
    assembly.write_stacked(x, back)
    assert torch.equal(back, stacked)


def test_shard_of_a_tensor_that_is_sharded_on_one_axis_already() -> None:
    mesh = mesh_of(2, 2)
    layout = parse_layout("S0,S0/2")
    x = torch.arange(24.0 * 12).reshape(SHAPE)
    for rank in range(4):
        coords = mesh.coords(rank)
        half = x.chunk(2)[coords[0]]
        part = shard_of(half, layout, mesh.sizes, coords, done=0)
        assert torch.equal(part, shard_of(x, layout, mesh.sizes, coords))


def test_shards_of_a_tensor_without_columns_have_their_rows() -> None:
    assert shard_of(torch.empty(8, 0), parse_layout("S0"), (2,), (1,)).shape == (4, 0)
    assert shard_of(torch.empty(8, 0), parse_layout("S1"), (2,), (1,)).shape == (8, 0)


def test_plain_row_shards_gather_without_a_copy() -> None:
    rows = Assembly((8, 4), (Shard(0),), (2,), (0,))
    columns = Assembly((8, 4), (Shard(1),), (2,), (0,))
    assert rows.is_view and not columns.is_view
    assert rows.shard_shape == (4, 4) and rows.gathered_shape == (8, 4) and rows.shard_numel == 16
