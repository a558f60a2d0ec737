"""Parameters that ranks hold alike."""

from dataclasses import dataclass, field

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshfold.distributed.rank_mesh import SingleMesh
from meshfold.ir.mesh import Mesh, MeshAxis
from meshfold.ir.node_groups import NodeLevels
from meshfold.training.calls.replicas import NUM_SAMPLES, TOLERANCE, first_different, names_alike

MESH = Mesh((MeshAxis("pp", 2), MeshAxis("dp", 3), MeshAxis("tp", 2), MeshAxis("cp", 1)))
CPU, LEVELS = torch.device("cpu"), NodeLevels(MESH, 0)
SHARDED = {"a": frozenset({"tp"}), "b": frozenset({"dp", "tp"}), "c": frozenset({"pp"})}


def test_axes_of_stages_and_of_one_rank_have_no_copies() -> None:
    mesh = SingleMesh(MESH, 0, CPU, LEVELS)
    assert names_alike(mesh, SHARDED) == {"dp": ("a", "c"), "tp": ("c",)}


@dataclass(frozen=True, eq=False)
class _Another(SingleMesh):
    """One rank of two: the other one has `other`, by name."""

    other: dict[str, Tensor] = field(default_factory=dict)

    def start_all_reduce(self, x: Tensor, axes: tuple[str, ...], reduction: str = "sum") -> Tensor:
        assert reduction == "max"
        theirs: list[Tensor] = []

        class Reads(SingleMesh):
            def start_all_reduce(
                self, y: Tensor, axes: tuple[str, ...], reduction: str = "sum"
            ) -> Tensor:
                theirs.append(y)
                return y.clone()

        first_different(Reads(MESH, 1, CPU, LEVELS), {axes[0]: [*self.other]}, self.other)
        return torch.maximum(x, theirs[0])


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 300), st.floats(-3 * TOLERANCE, 3 * TOLERANCE), st.integers(0, 2))
def test_what_rounding_does_passes_and_more_does_not(size: int, part: float, where: int) -> None:
    x = torch.rand(size, generator=torch.Generator().manual_seed(size)) + 1.0
    here = {name: x.clone() for name in "abc"}
    there = {name: x * (1.0 + part * (name == "abc"[where])) for name in "abc"}
    mesh = _Another(MESH, 0, CPU, LEVELS, other=there)
    found = first_different(mesh, {"dp": tuple("abc")}, here)
    if abs(part) < 0.5 * TOLERANCE:
        assert found == ""
    elif abs(part) > 2.1 * TOLERANCE:
        assert found == "abc"[where]


def test_groups_that_differ_go_on_with_those_that_agree() -> None:
    """Else they would wait for each other: every rank is in a group of each axis."""
    x, axes = torch.ones(2), []

    class Differs(SingleMesh):
        def start_all_reduce(
            self, y: Tensor, axis: tuple[str, ...], reduction: str = "sum"
        ) -> Tensor:
            axes.append(axis)
            return y + 1.0

    mesh = Differs(MESH, 0, CPU, LEVELS)
    assert first_different(mesh, {"dp": ("a",), "tp": ("b",)}, {"a": x, "b": x}) == "a"
    assert axes == [("dp",), ("tp",)]


def test_a_stage_compares_what_it_has_and_scalars_too() -> None:
    x = torch.tensor(2.0)
    mesh = _Another(MESH, 0, CPU, LEVELS, other={"b": x + 1})
    assert first_different(mesh, {"dp": ("a", "b")}, {"b": x}) == "b"
    assert first_different(mesh, {"dp": ("a",)}, {"b": x}) == ""
    assert NUM_SAMPLES > 1
