"""Mesh candidates."""

import pytest

from meshfold.cost_models.devices import cluster
from meshfold.cost_models.meshes import build_mesh, mesh_candidates
from meshfold.errors import ClusterSpecError
from meshfold.mesh import Mesh, MeshAxis


def test_candidates_are_all_factorisations_by_rising_tp() -> None:
    spec = cluster("dgx-h100x2")
    shown = [str(m) for m in mesh_candidates(spec, 16)]
    assert shown == ["dp16", "dp8 x tp2", "dp4 x tp4", "dp2 x tp8", "tp16"]
    assert all(m.num_ranks == 16 for m in mesh_candidates(spec, 16))


def test_one_device_is_a_mesh_of_no_axes() -> None:
    assert list(mesh_candidates(cluster("local-cpu"), 1)) == [Mesh(())]


def test_axes_name_the_slowest_link_they_cross() -> None:
    spec = cluster("dgx-h100x2")
    assert build_mesh(spec, 2, 8).axes == (
        MeshAxis("dp", 2, "ndr-ib"),
        MeshAxis("tp", 8, "nvlink4-switch"),
    )
    assert build_mesh(spec, 1, 16).axes == (MeshAxis("tp", 16, "ndr-ib"),)
    assert build_mesh(spec, 8, 1).axes == (MeshAxis("dp", 8, "nvlink4-switch"),)


def test_degrees_that_cannot_be_are_refused() -> None:
    spec = cluster("dgx-h100")
    with pytest.raises(ClusterSpecError, match="dp=4 x tp=4 needs 16 devices, cluster dgx-h100"):
        build_mesh(spec, 4, 4)
    with pytest.raises(ClusterSpecError, match="tp=0 is no degree"):
        build_mesh(spec, 1, 0)
    with pytest.raises(ClusterSpecError, match="devices: 0 devices"):
        list(mesh_candidates(spec, 0))
