"""Programs that a pass broke are refused by the pass's name."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.programs.schedules import captured_family, emitted, planned

from meshfold.codegen.emit.check_program import check_program
from meshfold.codegen.emit.pass_pipeline import PASSES, EmissionPass, PassRun, Subject, emit
from meshfold.codegen.program.emitted import PLACE, EmittedProgram
from meshfold.codegen.program.region_schedule import ActionKind, RegionSchedule
from meshfold.errors import PassError
from meshfold.ir.spmd import Shard
from meshfold.ops.conversions import WAITS

pytestmark = pytest.mark.xdist_group("schedules")


def layer(change: Callable[[RegionSchedule], RegionSchedule]) -> EmittedProgram:
    """The tp program of a Llama, with the schedule of its layers changed."""
    program = emitted("llama", "tp")
    first, region, *rest = program.regions
    assert region.schedule is not None
    broken = replace(region, schedule=change(region.schedule))
    return replace(program, regions=(first, broken, *rest))


def without(kind: ActionKind) -> Callable[[RegionSchedule], RegionSchedule]:
    """The first backward action of a kind left out."""

    def change(schedule: RegionSchedule) -> RegionSchedule:
        actions = list(schedule.backward)
        actions.remove(next(m for m in actions if m.kind == kind))
        return replace(schedule, backward=tuple(actions))

    return change


def backwards(schedule: RegionSchedule) -> RegionSchedule:
    return replace(schedule, backward=tuple(reversed(schedule.backward)))


def too_early(schedule: RegionSchedule) -> RegionSchedule:
    return replace(schedule, forward=tuple(reversed(schedule.forward)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(ActionKind.BACKWARD), "segments backward"),
        (without(ActionKind.WEIGHTS), "weights"),
        (backwards, "the backward of segment"),
        (too_early, "before it is computed"),
    ],
    ids=["B", "W", "backwards", "too early"],
)
def test_broken_schedules_are_found(
    change: Callable[[RegionSchedule], RegionSchedule], message: str
) -> None:
    with pytest.raises(PassError, match=f"pass schedule failed at region B: .*{message}"):
        check_program(layer(change), "schedule")
    check_program(layer(lambda schedule: schedule), "schedule")


def test_a_lost_collective_is_found() -> None:
    program = emitted("llama", "tp")
    region = program.regions[1]
    graph = region.graph.graph
    wait = next(n for n in graph.nodes if n.target in WAITS)
    with graph.inserting_after(wait):
        again = graph.call_function(wait.target, wait.args)
    try:
        with pytest.raises(PassError, match="has 2 waits"):
            check_program(program, "emit")
    finally:
        graph.erase_node(again)


def test_a_layout_that_does_not_divide_is_found() -> None:
    program = emitted("llama", "tp")
    node = next(n for n in program.regions[1].graph.graph.nodes if PLACE in n.meta)
    before = node.meta[PLACE]
    node.meta[PLACE] = before[0], tuple(Shard(0, 1 << 20) for _ in before[1])
    try:
        with pytest.raises(PassError, match=f"{node.name} as S0/1048576"):
            check_program(program, "emit")
    finally:
        node.meta[PLACE] = before


def test_passes_run_in_order_and_are_checked() -> None:
    ran: list[PassRun] = []
    plan = planned("llama", "tp")
    program = emit(captured_family("llama").graph, plan, ran.append)
    assert [(one.number, one.name) for one in ran] == [
        (1, "emit"),
        (2, "micro_chunks"),
        (3, "collective_matmul"),
        (4, "schedule"),
        (5, "chain"),
        (6, "bucket"),
    ]
    assert ran[-1].program is program and all(one.seconds > 0 for one in ran)
    assert all(region.schedule is None for region in ran[0].program.regions)
    eager: list[PassRun] = []
    emit(captured_family("llama").graph, replace(plan, mode="eager"), eager.append)
    assert [one.name for one in eager] == ["emit", "collective_matmul", "bucket"]

    def breaks(made: EmittedProgram | None, _: Subject) -> EmittedProgram:
        assert made is not None
        regions = tuple(replace(r, outputs=r.outputs[:-1]) for r in made.regions)
        return replace(made, regions=regions)

    passes = (*PASSES, EmissionPass("breaking", breaks))
    with pytest.raises(PassError, match="pass breaking failed at region A: outputs"):
        emit(captured_family("llama").graph, plan, passes=passes)
