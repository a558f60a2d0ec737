"""Shards against index-by-index cutting, and the way back."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from support_layouts import cut

from meshfold.mesh import Mesh, MeshAxis
from meshfold.shards import Assembly, shard_of
from meshfold.spmd import INVARIANT, REPLICATE, Layout, Shard, is_legal, parse_layout

SHAPE = (24, 12)
TYPES = [INVARIANT, *(Shard(d, b) for d in (0, 1) for b in (1, 2, 3, 6))]


def mesh_of(*sizes: int) -> Mesh:
    return Mesh(tuple(MeshAxis(name, n) for name, n in zip("abc", sizes, strict=False)))


def legal_layouts(mesh: Mesh) -> Iterator[Layout]:
    for layout in itertools.product(TYPES, repeat=len(mesh.axes)):
        if is_legal(SHAPE, layout, mesh.sizes):
            yield layout


@pytest.mark.parametrize("mesh", [mesh_of(2), mesh_of(2, 3), mesh_of(2, 2, 1)], ids=str)
def test_shard_of_is_the_cut_by_indices(mesh: Mesh) -> None:
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
        whole = assembly.whole(stacked)
        assert torch.equal(whole, wholes[group[0]])
        if assembly.is_view:
            assert whole.data_ptr() == stacked.data_ptr()
        back = torch.zeros_like(stacked)
        assembly.write_stacked(whole, back)
        assert torch.equal(back, stacked)


def test_shard_of_a_tensor_that_is_cut_on_one_axis_already() -> None:
    mesh = mesh_of(2, 2)
    layout = parse_layout("S0,S0/2")
    x = torch.arange(24.0 * 12).reshape(SHAPE)
    for rank in range(4):
        coords = mesh.coords(rank)
        half = x.chunk(2)[coords[0]]
        part = shard_of(half, layout, mesh.sizes, coords, done=0)
        assert torch.equal(part, shard_of(x, layout, mesh.sizes, coords))


def test_plain_row_shards_gather_without_a_copy() -> None:
    rows = Assembly((8, 4), (Shard(0),), (2,), (0,))
    columns = Assembly((8, 4), (Shard(1),), (2,), (0,))
    assert rows.is_view and not columns.is_view
    assert rows.shard_shape == (4, 4) and rows.whole_shape == (8, 4) and rows.shard_numel == 16
