"""Values that regions in line hand on in parts: what one joins, the next takes apart.

Such a value is read by the next instance alone, so nobody needs it whole, and neither the joining
nor the taking apart runs (passes/part_borders.py). Both regions run in pieces
(meshfold.schedule_program) and once: what full recomputation runs again arrives whole.
"""

from collections import Counter
from dataclasses import dataclass

from meshfold.codegen.program.emitted import EmittedProgram, RegionProgram
from meshfold.codegen.program.region_schedule import RegionSchedule
from meshfold.ir.op_graph import SourceKind
from meshfold.ops.conversions import STARTS
from meshfold.passes.chained_chunks.boundary_values import PartsCut, joined, taken_apart


@dataclass(frozen=True)
class Borders:
    """What comes to an instance, and leaves it, in parts. taken: (slot, output of the instance
    before), by output; handed: its own outputs, ascending."""

    taken: tuple[tuple[int, int], ...] = ()
    handed: tuple[int, ...] = ()

    @property
    def slots(self) -> frozenset[int]:
        return frozenset(slot for slot, _ in self.taken)

    def idle(self, schedule: RegionSchedule) -> frozenset[int]:
        """Pieces that do not run, as nothing is taken apart or joined."""
        taken = (schedule.taken[slot] for slot in self.slots)
        return frozenset((*taken, *(schedule.handed[n] for n in self.handed)))

    def taken_names(self, schedule: RegionSchedule) -> tuple[str, ...]:
        """The parts that come, by number."""
        pieces = (schedule.pieces.pieces[schedule.taken[slot]] for slot, _ in self.taken)
        return tuple(name for piece in pieces for name in piece.outputs)

    def handed_names(self, schedule: RegionSchedule) -> tuple[str, ...]:
        """The parts that leave, by number: as the next instance counts them."""
        pieces = (schedule.pieces.pieces[schedule.handed[n]] for n in self.handed)
        return tuple(name for piece in pieces for name in piece.inputs[1:])


def communicates(region: RegionProgram) -> bool:
    """Whether a region has collectives inside."""
    return any(node.target in STARTS for node in region.graph.graph.nodes)


def borders_of(program: EmittedProgram) -> tuple[Borders, ...]:
    """Per instance what comes and leaves in parts."""
    folded = program.folded
    taken: dict[int, dict[int, PartsCut]] = {}
    made: dict[int, dict[int, PartsCut]] = {}
    for number, region in enumerate(program.regions):
        if is_in_parts(program, region) and region.recompute == "none":
            taken[number] = taken_apart(region.ops, region.typing)
            made[number] = joined(region.ops, region.typing)
    readers = _readers(program)
    found: list[list[tuple[int, int]]] = []
    for k, instance in enumerate(folded.instances):
        slots = []
        for v, cut in taken.get(program.programs[k], {}).items():
            source = instance.sources[v]
            if source.kind is not SourceKind.VALUE or source.instance != k - 1:
                continue
            handed = made.get(program.programs[k - 1], {}).get(source.output)
            is_alone = readers[source.instance, source.output] == 1
            if handed is not None and is_alone and handed.of == cut.of:
                slots.append((source.output, v))
        found.append([(v, n) for n, v in sorted(slots)])
    leaves = [tuple(n for _, n in taken) for taken in (*found[1:], [])]
    return tuple(Borders(tuple(t), handed) for t, handed in zip(found, leaves, strict=True))


def is_in_parts(program: EmittedProgram, region: RegionProgram) -> bool:
    """Whether a region is written otherwise than it was captured, and has pieces."""
    return region.ops is not program.folded.regions[region.region].graph and communicates(region)


def _readers(program: EmittedProgram) -> Counter[tuple[int, int]]:
    """How many slots, and outputs of the program, read each output of an instance."""
    folded = program.folded
    sources = [source for instance in folded.instances for source in instance.sources]
    sources += [output.source for output in folded.outputs]
    values = [s for s in sources if s.kind is SourceKind.VALUE]
    return Counter((s.instance, s.output) for s in values)
