"""Programs whose ranks share the experts: tokens travel to them and back, and every loss and
gradient is that of one process, whatever the routing."""

from functools import cache

import pytest
from support_models import BATCH, tiny_model
from support_programs import errors_of_a_step
from support_switch import tiny_switch
from torch import Tensor, nn

from meshfold.capture import Captured, capture
from meshfold.cost_models.devices import resolve_cluster
from meshfold.cost_models.meshes import build_mesh
from meshfold.emit import emit_typed
from meshfold.passes.uniform_search import MeshSearch
from meshfold.precision import float64_everywhere
from meshfold.program import EmittedProgram
from meshfold.strategy import Degrees


@cache
def captured(family: str) -> tuple[nn.Module, dict[str, Tensor], Captured]:
    model, batch = tiny_switch() if family == "switch" else tiny_model(family)
    with float64_everywhere():
        return model, batch, capture(model, batch)


def emitted(family: str, degrees: Degrees, zero: int) -> EmittedProgram:
    _, _, found = captured(family)
    cluster = resolve_cluster("local-cpu", degrees.dp * degrees.ep * degrees.tp)
    mesh = build_mesh(cluster, degrees.dp, degrees.tp, ep=degrees.ep)
    search = MeshSearch(found.graph, cluster, mesh, BATCH)
    typed = search.solve(zero=zero, sequence_parallel=False)
    return emit_typed(found.graph, typed.typings, mesh, search.costs)


@pytest.mark.parametrize(
    ("degrees", "zero"),
    [
        (Degrees(ep=4), 0),
        (Degrees(dp=2, ep=2), 3),
        pytest.param(Degrees(dp=2, ep=2), 0, marks=pytest.mark.slow),
        pytest.param(Degrees(ep=2, tp=2), 0, marks=pytest.mark.slow),
        pytest.param(Degrees(dp=2, ep=2, tp=2), 3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tokens_travel_and_every_gradient_is_that_of_one_process(
    degrees: Degrees, zero: int
) -> None:
    program = emitted("mixtral", degrees, zero)
    text = program.text(0)
    assert "dispatch" in text and "combine" in text
    axis = program.mesh.index("ep")
    for name, layout in program.stored.items():
        is_expert = ".experts." in name
        if is_expert:
            assert (layout[axis].kind, layout[axis].dim) == ("S", 0), name
        else:
            assert layout[axis].is_shard == (zero == 3), name
    for errors in errors_of_a_step(*captured("mixtral"), program):
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] <= 1e-12, worst


@pytest.mark.parametrize(
    ("degrees", "zero"),
    [
        (Degrees(ep=4), 0),
        pytest.param(Degrees(dp=2, ep=2), 3, marks=pytest.mark.slow),
        pytest.param(Degrees(ep=2, tp=2), 0, marks=pytest.mark.slow),
        pytest.param(Degrees(dp=4), 3, marks=pytest.mark.slow),
        pytest.param(Degrees(tp=4), 0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_experts_that_are_modules_of_their_own_are_shared_as_well(
    degrees: Degrees, zero: int
) -> None:
    """Their weights are cut where the products read them, and stored as other parameters are."""
    program = emitted("switch", degrees, zero)
    text = program.text(0)
    assert ("dispatch" in text) == ("combine" in text) == (degrees.ep > 1)
    for errors in errors_of_a_step(*captured("switch"), program):
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] <= 1e-12, worst
