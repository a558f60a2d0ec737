"""Meshes of degrees on clusters."""

import pytest

from meshfold.cost_models.hardware.devices import cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.errors import ClusterSpecError
from meshfold.ir.mesh import Mesh, MeshAxis


def test_one_device_is_a_mesh_of_no_axes() -> None:
    assert build_mesh(cluster("local-cpu"), 1, 1) == Mesh(())


def test_cp_is_between_dp_and_tp() -> None:
    mesh = build_mesh(cluster("dgx-h100x2"), 2, 2, cp=4)
    assert str(mesh) == "dp2 x cp4 x tp2"
    assert mesh.axes[1] == MeshAxis("cp", 4, "nvlink4-switch")


def test_ep_is_inside_of_dp() -> None:
    mesh = build_mesh(cluster("dgx-h100x2"), 2, 2, ep=4)
    assert str(mesh) == "dp2 x ep4 x tp2"
    assert mesh.axes[1] == MeshAxis("ep", 4, "nvlink4-switch")


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
    with pytest.raises(ClusterSpecError, match="dp=2 x cp=4 x tp=2 needs 16 devices"):
        build_mesh(spec, 2, 2, cp=4)
