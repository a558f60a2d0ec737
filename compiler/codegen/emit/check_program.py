"""What must hold of an emitted program after every pass: wiring, types, order of collectives.

wiring        graphs are sound, their first placeholders are those that the runtime passes, and
              every segment of a schedule runs once in either direction, behind what it reads
types         every value has a layout that its shape allows; outputs leave as the plan says
collectives   every start has one wait, behind it; a schedule has those of its graph, no others
"""

from collections import Counter
from collections.abc import Callable, Sequence

from meshfold.codegen.program.emitted import (
    CONTEXT,
    PLACE,
    EmittedProgram,
    RegionProgram,
    group_name,
)
from meshfold.codegen.program.region_schedule import ActionKind, RegionAction, RegionSchedule
from meshfold.codegen.schedule.split_backward import deferred_names
from meshfold.errors import PassError
from meshfold.ir.spmd import is_legal, layout_text
from meshfold.ops.conversions import STARTS, WAITS

Check = Callable[[EmittedProgram, RegionProgram], None]

FIRST = (CONTEXT, "ahead", "instance")
"""Placeholders of every region graph."""


def check_program(program: EmittedProgram, after: str) -> None:
    """Raises PassError, naming the pass `after` which it was found, and the region."""
    checks: tuple[Check, ...] = (_check_wiring, _check_types, _check_collectives)
    for region in program.regions:
        for check in checks:
            try:
                check(program, region)
            except (AssertionError, RuntimeError) as error:
                raise PassError(after, f"region {region.name}", str(error)) from error


def _check_wiring(_: EmittedProgram, region: RegionProgram) -> None:
    region.graph.graph.lint()
    names = [n.name for n in region.graph.graph.nodes if n.op == "placeholder"]
    groups = tuple(group_name(k) for k in range(len(region.groups)))
    assert tuple(names[: len(FIRST) + len(groups)]) == (*FIRST, *groups), "placeholders"
    if region.schedule is not None:
        _check_schedule(region.schedule, set(names))


def _check_schedule(schedule: RegionSchedule, known: set[str]) -> None:
    """Every segment runs once in either direction, after what it reads."""
    graph = schedule.graph
    everything = list(range(len(graph.segments)))
    for action in schedule.forward:
        if action.kind == ActionKind.UNSHARD:
            known |= {name for name, (b, _) in graph.members.items() if b == action.number}
        elif action.kind == ActionKind.FORWARD:
            segment = graph.segments[action.number]
            missing = [name for name in segment.inputs if name not in known]
            assert not missing, f"segment {action.number} reads {missing[0]} before it is computed"
            known |= set(segment.outputs)
    assert known.issuperset(graph.results), "a result is not computed"
    assert (
        sorted(m.number for m in schedule.forward if m.kind == ActionKind.FORWARD) == everything
    ), "segments"
    position = _positions(schedule.backward, ActionKind.BACKWARD)
    assert sorted(position) == everything, "segments backward"
    makers = graph.makers
    for k, segment in enumerate(graph.segments):
        for maker in {makers[name] for name in segment.inputs if name in makers}:
            assert position[k] < position[maker], (
                f"the backward of segment {maker} needs that of {k}"
            )
    deferred = _positions(schedule.backward, ActionKind.WEIGHTS)
    assert deferred.keys() == schedule.deferred_s.keys(), "weights"
    assert all(position[k] < at for k, at in deferred.items()), "weights before their backward"
    reduced = _positions(schedule.backward, ActionKind.REDUCE)
    for k, at in deferred.items():
        for name in deferred_names(graph.segments[k]):
            if name in makers:
                needed = position[makers[name]]
                assert at < needed, (
                    f"the backward of segment {makers[name]} needs the weights of {k}"
                )
            elif name in graph.members:
                group, _ = graph.members[name]
                assert at < reduced[group], f"group {group} needs the weights of segment {k}"


def _positions(actions: Sequence[RegionAction], kind: ActionKind) -> dict[int, int]:
    """Number of every action of `kind` -> its position in the order."""
    return {action.number: k for k, action in enumerate(actions) if action.kind == kind}


def _check_types(program: EmittedProgram, region: RegionProgram) -> None:
    ops, sizes = region.ops, program.mesh.sizes
    for node in region.graph.graph.nodes:
        if PLACE in node.meta:
            v, layout = node.meta[PLACE]
            assert is_legal(ops.values[v].shape, layout, sizes), (
                f"{node.name} as {layout_text(layout)} of {list(ops.values[v].shape)}"
            )
    assert region.outputs == program.typings[region.region].outputs, "outputs"


def _check_collectives(_: EmittedProgram, region: RegionProgram) -> None:
    found: Counter[str] = Counter()
    for node in region.graph.graph.nodes:
        if node.target in STARTS:
            waits = [u for u in node.users if u.target in WAITS]
            assert len(waits) == len(node.users) == 1, f"{node.name} has {len(waits)} waits"
            found[node.name] += 1
    if region.schedule is None:
        return
    segments = region.schedule.graph.segments
    starts = Counter(p.outputs[0] for p in segments if p.kind == "start")
    assert starts == found, "collectives were lost or added"
    for actions, kind in (
        (region.schedule.forward, ActionKind.FORWARD),
        (region.schedule.backward, ActionKind.BACKWARD),
    ):
        position = _positions(actions, kind)
        for k, segment in enumerate(segments):
            if segment.kind == "wait":
                ordered = position[segment.partner] < position[k]
                assert ordered == (kind == ActionKind.FORWARD), (
                    f"segment {k} waits before its start"
                )
