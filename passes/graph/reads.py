"""What the instances of a program read: worked out once, splitting regions changes none of it.

Exact figures of a program are sums over its instances (passes/price/step.py, passes/memory/zero.py)
or one walk over them (cost_models/memory/step_memory.py). The search asks for program after program
with the same instances under other regions, so what depends on sources alone is kept here.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from meshfold.ir.op_graph import BufferInfo, FoldedGraph, ParameterInfo, Source, SourceKind


@dataclass(frozen=True)
class FirstReads:
    """Slots of one instance that read what no slot before has read, the values of other instances
    left out. trained: those parameters that have a gradient; tied: those of them that other slots
    read, too; buffers: constants, too."""

    parameters: tuple[int, ...]
    trained: tuple[int, ...]
    buffers: tuple[int, ...]
    inputs: tuple[int, ...]
    tied: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reads:
    """The sources of one instance. values: slot -> (instance, output) that made it. tied: slot ->
    name of a parameter, or of the slice of one, that other slots or instances read, too."""

    values: Mapping[int, tuple[int, int]]
    tied: Mapping[int, str]
    first: FirstReads


class Crossing(NamedTuple):
    """Output number `output` of region `maker` goes to slot `slot` of region `reader`."""

    reader: int
    slot: int
    maker: int
    output: int


@dataclass(frozen=True)
class ProgramReads:
    """The reads of every instance, and the parameters and buffers that none reads."""

    instances: tuple[Reads, ...]
    unread: tuple[ParameterInfo, ...]
    unread_buffers: tuple[BufferInfo, ...]

    def count_first(self, folded: FoldedGraph) -> Counter[tuple[int, FirstReads]]:
        """(region, what is read there first) -> number of instances. folded: the graph of these
        reads, or one that it was split into."""
        pairs = zip(folded.instances, self.instances, strict=True)
        return Counter((instance.region, of.first) for instance, of in pairs)

    def count_crossings(self, folded: FoldedGraph) -> Counter[Crossing]:
        """How often each value goes from region to region. folded: as for count_first."""
        regions = [instance.region for instance in folded.instances]
        return Counter(
            Crossing(reader, slot, regions[maker], output)
            for reader, of in zip(regions, self.instances, strict=True)
            for slot, (maker, output) in of.values.items()
        )


def program_reads(folded: FoldedGraph) -> ProgramReads:
    """The reads of a program."""
    trained = {p.name for p in folded.parameters if p.requires_grad}
    readers = Counter(
        source.label
        for instance in folded.instances
        for source in instance.sources
        if source.kind is SourceKind.PARAMETER
    )
    known: set[Source] = set()
    found = []
    for instance in folded.instances:
        values, tied = {}, {}
        first: dict[SourceKind, list[int]] = {kind: [] for kind in SourceKind}
        for slot, source in enumerate(instance.sources):
            if source.kind is SourceKind.VALUE:
                values[slot] = source.instance, source.output
                continue
            if source.kind is SourceKind.PARAMETER and readers[source.label] > 1:
                tied[slot] = source.label
            if source not in known:
                known.add(source)
                first[source.kind].append(slot)
        parameters = first[SourceKind.PARAMETER]
        updated = tuple(i for i in parameters if instance.sources[i].name in trained)
        first_reads = FirstReads(
            tuple(parameters),
            updated,
            (*first[SourceKind.BUFFER], *first[SourceKind.CONSTANT]),
            tuple(first[SourceKind.INPUT]),
            tuple(i for i in updated if i in tied),
        )
        found.append(Reads(values, tied, first_reads))
    read = {s.name for instance in folded.instances for s in instance.sources}
    unread = tuple(p for p in folded.parameters if p.name not in read)
    unread_buffers = tuple(b for b in folded.buffers if b.name not in read)
    return ProgramReads(tuple(found), unread, unread_buffers)
