"""Mesh coordinates and groups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfold.ir.mesh import Mesh, MeshAxis

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
