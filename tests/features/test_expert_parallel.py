"""Programs whose ranks share the experts: tokens travel to them and back, and every loss and
gradient is that of one process, whatever the routing."""

from dataclasses import replace
from functools import cache

import pytest
from support.models.hugging_face import BATCH, tiny_model
from support.models.switch import tiny_switch
from support.processes.pool import Pools
from support.programs.local_programs import errors_of_a_step
from support.programs.schedules import PINS, captured_family, plan_text, planned
from support.programs.schedules import emitted as scheduled
from torch import Tensor, nn

from meshfold.capture.pipeline import Captured, capture
from meshfold.codegen.emit.pass_pipeline import emit
from meshfold.codegen.emit.region import emit_typed
from meshfold.codegen.program.emitted import EmittedProgram, RegionProgram
from meshfold.codegen.program.region_schedule import ActionKind
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.ir.strategy import Chunking, Degrees
from meshfold.ops.conversions import STARTS
from meshfold.ops.expert_dispatch import routed, start_combine, start_dispatch
from meshfold.passes.region.typing import MeshSearch
from meshfold.validation.float64_mode import float64_everywhere


@cache
def captured(family: str) -> tuple[nn.Module, dict[str, Tensor], Captured]:
    model, batch = tiny_switch() if family == "switch" else tiny_model(family)
    with float64_everywhere():
        return model, batch, capture(model, batch)


def emitted(family: str, degrees: Degrees, zero: int) -> EmittedProgram:
    _, _, found = captured(family)
    dp, cp, tp, ep, _ = degrees
    cluster = resolve_cluster("local-cpu", dp * cp * tp * ep)
    mesh = build_mesh(cluster, dp, tp, cp=cp, ep=ep)
    search = MeshSearch(found.graph, cluster, mesh, BATCH)
    typed = search.solve(zero=zero, mode="tensor")
    return emit_typed(found.graph, typed.typings, search.costs)


@pytest.mark.parametrize(
    ("degrees", "zero"),
    [
        (Degrees(ep=4), 0),
        (Degrees(dp=2, ep=2), 3),
        (Degrees(ep=2, cp=2, tp=2), 0),
        pytest.param(Degrees(ep=2, cp=2), 3, marks=pytest.mark.slow),
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
    """Their weights are shards where the products read them, and stored as other parameters are."""
    program = emitted("switch", degrees, zero)
    text = program.text(0)
    assert ("dispatch" in text) == ("combine" in text) == (degrees.ep > 1)
    for errors in errors_of_a_step(*captured("switch"), program):
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] <= 1e-12, worst


# Scheduled, and in parts.


def layer(program: EmittedProgram) -> RegionProgram:
    """The region with the experts."""
    return next(r for r in program.regions if "expert_linear" in str(r.graph.code))


def in_rows(pins: str, count: int) -> EmittedProgram:
    """Layers in parts of their sequence."""
    plan = planned("mixtral", pins)
    first, *others = plan.regions
    cut = (replace(r, chunking=Chunking(count, "sequence")) for r in others)
    return emit(captured_family("mixtral").graph, replace(plan, regions=(first, *cut)))


@pytest.mark.parametrize("parts", [1, 2])
def test_every_part_has_one_route_and_its_rows_travel_there_and_back(parts: int) -> None:
    found = [n.target for n in layer(scheduled("mixtral", "ep", parts=parts)).graph.graph.nodes]
    for function in (routed, start_dispatch, start_combine):
        assert found.count(function) == parts
    assert sum(f in STARTS for f in found) == 2 * parts


def test_rows_of_one_part_travel_while_experts_compute_on_another() -> None:
    """In both directions, and without parts in neither: all else waits for them."""
    for parts in (1, 2):
        schedule = layer(scheduled("mixtral", "ep", parts=parts)).schedule
        assert schedule is not None
        segments = schedule.graph.segments
        experts = {
            k
            for k, segment in enumerate(segments)
            if segment.kind == "ops" and "expert_linear" in str(segment.graph.code)
        }
        for actions, kind, first in (
            (schedule.forward, ActionKind.FORWARD, "start"),
            (schedule.backward, ActionKind.BACKWARD, "wait"),
        ):
            flying, beside = 0, 0
            for move in actions:
                if move.kind == kind and segments[move.number].kind != "ops":
                    flying += 1 if segments[move.number].kind == first else -1
                elif move.kind == kind and move.number in experts:
                    beside += flying > 0
            assert (beside > 0) == (parts > 1)


@pytest.mark.parametrize(
    ("pins", "count"),
    [
        ("ep4", 2),
        pytest.param("ep", 4, marks=pytest.mark.slow),
        pytest.param("ep x tp", 4, marks=pytest.mark.slow),
        pytest.param("zero3 x ep", 2, marks=pytest.mark.slow),
        pytest.param("zero3 x ep, again", 4, marks=pytest.mark.slow),
    ],
)
def test_rows_of_a_sequence_go_to_experts_in_parts(pins: str, count: int) -> None:
    """A rank may have one sample."""
    model, batch = tiny_model("mixtral")
    program = in_rows(pins, count)
    found = [n.target for n in layer(program).graph.graph.nodes]
    assert found.count(start_dispatch) == count
    with float64_everywhere():
        errors = errors_of_a_step(model, batch, captured_family("mixtral"), program)
    assert max(max(of.values()) for of in errors) <= 1e-12


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("pins", "parts"),
    [
        pytest.param("ep", 2, marks=pytest.mark.slow),
        pytest.param("ep4", 1, marks=pytest.mark.slow),
        pytest.param("zero3 x ep, again", 2, marks=pytest.mark.slow),
    ],
)
def test_the_same_on_processes(pools: Pools, pins: str, parts: int) -> None:
    arguments = "mixtral", captured_family("mixtral"), plan_text("mixtral", pins, parts=parts)
    found = pools.run(PINS[pins][0], "support.programs.emit:compare_step", *arguments)
    for loss_error, gradient_error, name, uneven in found:
        assert loss_error <= 1e-12 and gradient_error <= 1e-12, name
        assert not uneven
