"""Programs of experts with a capacity: whichever tokens are dropped, and on whatever mesh, the loss
and every gradient are those of one process."""

from functools import cache

import pytest
from support.models.experts import BATCH, KINDS, capacity_model
from support.programs.local_programs import errors_of_a_step
from torch import Tensor, nn

from meshfold.capture.pipeline import Captured, capture
from meshfold.codegen.emit.region import emit_typed
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.ir.strategy import Degrees
from meshfold.passes.region.typing import MeshSearch
from meshfold.validation.float64_mode import float64_everywhere

slow = pytest.mark.slow


@cache
def captured(kind: str) -> tuple[nn.Module, dict[str, Tensor], Captured]:
    model, batch = capacity_model(kind)
    with float64_everywhere():
        return model, batch, capture(model, batch)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("degrees", "zero", "sequence_parallel"),
    [
        (Degrees(ep=4), 0, False),
        (Degrees(dp=2, ep=2), 3, False),
        pytest.param(Degrees(ep=2, tp=2), 0, True, marks=slow),
        pytest.param(Degrees(ep=2, tp=2), 3, False, marks=slow),
        pytest.param(Degrees(ep=2), 0, False, marks=slow),
        pytest.param(Degrees(dp=4), 3, False, marks=slow),
        pytest.param(Degrees(dp=2), 0, False, marks=slow),
        pytest.param(Degrees(tp=4), 0, False, marks=slow),
        pytest.param(Degrees(dp=2, tp=2), 3, True, marks=slow),
        pytest.param(Degrees(dp=2, ep=2, tp=2), 3, True, marks=slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_gradient_is_that_of_one_process(
    kind: str, degrees: Degrees, zero: int, sequence_parallel: bool
) -> None:
    _, _, found = captured(kind)
    cluster = resolve_cluster("local-cpu", degrees.dp * degrees.ep * degrees.tp)
    mesh = build_mesh(cluster, degrees.dp, degrees.tp, ep=degrees.ep)
    search = MeshSearch(found.graph, cluster, mesh, BATCH)
    typed = search.solve(zero=zero, mode="sequence" if sequence_parallel else "tensor")
    program = emit_typed(found.graph, typed.typings, search.costs)
    if degrees.ep > 1:
        axis, dim = mesh.index("ep"), int(kind == "prototypes")
        for name in ("up", "down"):
            stored = program.stored[f"layers.0.experts.{name}"][axis]
            assert (stored.kind, stored.dim) == ("S", dim), name
    for errors in errors_of_a_step(*captured(kind), program):
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] <= 1e-12, worst


@pytest.mark.parametrize("kind", KINDS)
def test_the_models_drop_tokens(kind: str) -> None:
    """With room for all, the loss is another: the tests above see a capacity at work."""
    with_drops, batch = capacity_model(kind)
    with_room, _ = capacity_model(kind, capacity=BATCH * 8)
    assert with_drops(**batch) != with_room(**batch)
