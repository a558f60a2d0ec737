"""What must hold of an emitted program after every pass: wiring, types, order of collectives.

wiring        graphs are sound, their first placeholders are those that the runtime passes, and
              every piece of a schedule runs once in either direction, behind what it reads
types         every value has a layout that its shape allows; outputs leave as the plan says
collectives   every start has one wait, behind it; a schedule has those of its graph, no others
"""

from collections import Counter
from collections.abc import Callable

from meshfold.codegen.program.emitted import PLACE, EmittedProgram, RegionProgram
from meshfold.codegen.program.region_schedule import RegionSchedule
from meshfold.codegen.schedule.split_backward import late_names
from meshfold.errors import PassError
from meshfold.ir.spmd import is_legal, layout_text
from meshfold.ops.conversions import STARTS, WAITS

Check = Callable[[EmittedProgram, RegionProgram], None]

FIRST = ("mesh", "ahead", "instance")
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
    buckets = tuple(f"bucket_{k}" for k in range(len(region.buckets)))
    assert tuple(names[: len(FIRST) + len(buckets)]) == (*FIRST, *buckets), "placeholders"
    if region.schedule is not None:
        _check_schedule(region.schedule, set(names))


def _check_schedule(schedule: RegionSchedule, known: set[str]) -> None:
    """Pieces in both directions."""
    pieces = schedule.pieces
    everything = list(range(len(pieces.pieces)))
    for move in schedule.forward:
        if move.kind == "O":
            known |= {name for name, (b, _) in pieces.members.items() if b == move.number}
        elif move.kind == "F":
            piece = pieces.pieces[move.number]
            missing = [name for name in piece.inputs if name not in known]
            assert not missing, f"piece {move.number} reads {missing[0]} before it is made"
            known |= set(piece.outputs)
    assert known.issuperset(pieces.results), "a result is not made"
    assert sorted(m.number for m in schedule.forward if m.kind == "F") == everything, "pieces"
    place = {m.number: k for k, m in enumerate(schedule.backward) if m.kind == "B"}
    assert sorted(place) == everything, "pieces backward"
    makers = pieces.makers()
    for k, piece in enumerate(pieces.pieces):
        for maker in {makers[name] for name in piece.inputs if name in makers}:
            assert place[k] < place[maker], f"the backward of piece {maker} needs that of {k}"
    late = {m.number: k for k, m in enumerate(schedule.backward) if m.kind == "W"}
    assert late.keys() == schedule.late_s.keys(), "weights"
    assert all(place[k] < at for k, at in late.items()), "weights before their backward"
    reduced = {m.number: k for k, m in enumerate(schedule.backward) if m.kind == "R"}
    for k, at in late.items():
        for name in late_names(pieces.pieces[k]):
            if name in makers:
                asked = place[makers[name]]
                assert at < asked, f"the backward of piece {makers[name]} needs the weights of {k}"
            elif name in pieces.members:
                bucket, _ = pieces.members[name]
                assert at < reduced[bucket], f"bucket {bucket} needs the weights of piece {k}"


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
    pieces = region.schedule.pieces.pieces
    starts = Counter(p.outputs[0] for p in pieces if p.kind == "start")
    assert starts == found, "collectives were lost or added"
    for moves, kind in ((region.schedule.forward, "F"), (region.schedule.backward, "B")):
        place = {m.number: k for k, m in enumerate(moves) if m.kind == kind}
        for k, piece in enumerate(pieces):
            if piece.kind == "wait":
                ordered = place[piece.partner] < place[k]
                assert ordered == (kind == "F"), f"piece {k} waits before its start"
