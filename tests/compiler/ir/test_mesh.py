"""Mesh coordinates and groups."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshfold.ir.mesh import Mesh, MeshAxis
from meshfold.ir.spmd import is_legal, layout_text, local_shape, parse_layout
from meshfold.sharding.layout import shard_of

meshes = st.lists(st.integers(1, 4), max_size=3).map(
    lambda sizes: Mesh(tuple(MeshAxis(f"a{k}", n) for k, n in enumerate(sizes)))
)


@given(meshes)
def test_coords_and_rank_are_inverse(mesh: Mesh) -> None:
    assert [mesh.rank(mesh.coords(r)) for r in range(mesh.num_ranks)] == list(range(mesh.num_ranks))


@given(meshes, st.data())
def test_groups_partition_the_ranks(mesh: Mesh, data: st.DataObject) -> None:
    names = tuple(n for n in mesh.names if data.draw(st.booleans()))
    groups = list(mesh.groups(names))
    assert sorted(r for g in groups for r in g) == list(range(mesh.num_ranks))
    for group in groups:
        fixed = {
            tuple(c for n, c in zip(mesh.names, mesh.coords(r), strict=True) if n not in names)
            for r in group
        }
        assert len(fixed) == 1
        assert list(group) == sorted(group)


def test_the_last_axis_varies_fastest() -> None:
    mesh = Mesh((MeshAxis("dp", 2), MeshAxis("tp", 3)))
    assert mesh.coords(4) == (1, 1)
    assert list(mesh.groups(("tp",))) == [(0, 1, 2), (3, 4, 5)]
    assert list(mesh.groups(("dp",))) == [(0, 3), (1, 4), (2, 5)]
    assert str(mesh) == "dp2 x tp3"
    assert str(Mesh(())) == "one rank"


def test_bad_meshes_are_refused() -> None:
    with pytest.raises(ValueError, match="axis names must differ"):
        Mesh((MeshAxis("dp", 2), MeshAxis("dp", 2)))
    with pytest.raises(ValueError, match="at least one rank"):
        Mesh((MeshAxis("dp", 0),))
    with pytest.raises(ValueError, match="rank 2 is not on a mesh of 2"):
        Mesh((MeshAxis("dp", 2),)).coords(2)


HYBRID = Mesh((MeshAxis("dp", 8, replicas=4), MeshAxis("tp", 2)))


def test_replicas_are_an_axis_of_the_storage_mesh() -> None:
    assert str(HYBRID) == "dp8 (dp_shard2) x tp2"
    assert str(HYBRID.storage) == "dp_replicate4 x dp_shard2 x tp2"
    assert HYBRID.with_replicas(1).storage == HYBRID.with_replicas(1)
    assert list(HYBRID.storage.groups(("dp_shard",)))[:2] == [(0, 2), (1, 3)]
    assert next(HYBRID.storage.groups(("dp_replicate",))) == (0, 4, 8, 12)


@pytest.mark.parametrize(
    ("layout", "stored"),
    [
        ("S0*4,I", "I,S0,I"),
        ("S0/2*4,S0", "I,S0/2,S0"),
        ("S0+*4,S1", "I,S0+,S1"),
        ("S0,I", "S0,S0/4,I"),
        ("I,S1", "I,I,S1"),
        ("R,R", "R,R,R"),
    ],
)
def test_ranks_hold_the_same_on_the_storage_mesh(layout: str, stored: str) -> None:
    found = HYBRID.on_storage(parse_layout(layout))
    assert layout_text(found) == stored
    if "R" in layout:
        return
    x = torch.arange(16.0 * 6).view(16, 6)
    assert is_legal(x.shape, found, HYBRID.storage.sizes)
    for rank in range(HYBRID.num_ranks):
        coarse = shard_of(x, parse_layout(layout), HYBRID.sizes, HYBRID.coords(rank))
        fine = shard_of(x, found, HYBRID.storage.sizes, HYBRID.storage.coords(rank))
        assert torch.equal(coarse, fine)
        assert coarse.shape == local_shape(x.shape, parse_layout(layout), HYBRID.sizes)


def test_replicas_are_of_the_data_axis() -> None:
    for axis in (MeshAxis("tp", 4, replicas=2), MeshAxis("dp", 4, replicas=3)):
        with pytest.raises(ValueError, match="replicas are of dp"):
            Mesh((axis,))
