"""Values that cross the boundary between two instances in chunks.

Such a value is read by the next instance alone, so nobody needs it joined, and neither the joining
nor the splitting runs (meshfold.passes.chained_chunks.boundary_values). Both regions run by
segments and once: what full recomputation runs a second time arrives joined.
"""

from collections import Counter

from meshfold.codegen.program.emitted import EmittedProgram, RegionProgram
from meshfold.codegen.program.region_schedule import ChunkedBoundary
from meshfold.codegen.schedule.list_scheduling import communicates
from meshfold.ir.op_graph import SourceKind
from meshfold.passes.chained_chunks import ChunkedValue, joined_outputs, split_slots


def chunked_boundaries(program: EmittedProgram) -> tuple[ChunkedBoundary, ...]:
    """What every instance receives and sends in chunks."""
    folded = program.folded
    split: dict[int, dict[int, ChunkedValue]] = {}
    joined: dict[int, dict[int, ChunkedValue]] = {}
    for number, region in enumerate(program.regions):
        if is_chunked(program, region) and region.recompute == "none":
            split[number] = split_slots(region.ops, region.typing)
            joined[number] = joined_outputs(region.ops, region.typing)
    readers = _readers(program)
    found: list[list[tuple[int, int]]] = []
    for k, instance in enumerate(folded.instances):
        slots = []
        for v, value in split.get(program.programs[k], {}).items():
            source = instance.sources[v]
            if source.kind is not SourceKind.VALUE or source.instance != k - 1:
                continue
            sent = joined.get(program.programs[k - 1], {}).get(source.output)
            has_one_reader = readers[source.instance, source.output] == 1
            if sent is not None and has_one_reader and sent.chunks == value.chunks:
                slots.append((source.output, v))
        found.append([(v, n) for n, v in sorted(slots)])
    sent_by = [tuple(n for _, n in received) for received in (*found[1:], [])]
    pairs = zip(found, sent_by, strict=True)
    return tuple(ChunkedBoundary(tuple(received), sent) for received, sent in pairs)


def is_chunked(program: EmittedProgram, region: RegionProgram) -> bool:
    """Whether a region is written otherwise than it was captured, and runs by segments."""
    return region.ops is not program.folded.regions[region.region].graph and communicates(region)


def _readers(program: EmittedProgram) -> Counter[tuple[int, int]]:
    """How many slots, and outputs of the program, read each output of an instance."""
    folded = program.folded
    sources = [source for instance in folded.instances for source in instance.sources]
    sources += [output.source for output in folded.outputs]
    values = [s for s in sources if s.kind is SourceKind.VALUE]
    return Counter((s.instance, s.output) for s in values)
