"""A typed program, split into the programs of its pipeline stages.

    stage s      instances of its own, in order, behind copies of earlier ones that are reduced to
                 what does not depend on the batch, or on inputs alone (masks, rotary tables,
                 position biases)
    boundary s   what stage s takes over from stage s - 1: every other value that is computed before
                 it and is read by it or behind it, in order

passes/split/stage_crossing.py says which values cross. What a later stage reads is passed on
from neighbour to neighbour, as it is priced (passes/pipeline/problem.py); gradients come back the
same way. Model inputs cross nothing: every stage reads the batch. A parameter that several stages
read is in each of them.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from meshfold.errors import OptionError
from meshfold.ir.op_graph import (
    FoldedGraph,
    Instance,
    OpGraph,
    OutputInfo,
    Region,
    Source,
    SourceKind,
    Value,
)
from meshfold.ir.spmd import Layout
from meshfold.ir.strategy import RegionTyping
from meshfold.passes.graph.places import op_place
from meshfold.passes.rules.ops.random import with_own_draw
from meshfold.passes.split.stage_crossing import crossing_readers


@dataclass(frozen=True)
class StageBoundaryValue:
    """Output `output` of instance `instance` of the whole program, on its way between stages.
    layout: that it is computed in, and crosses in."""

    instance: int
    output: int
    value: Value
    layout: Layout

    @property
    def name(self) -> str:
        return f"{self.instance}.{self.output}"

    @property
    def source(self) -> Source:
        """How the stages that take it over read it."""
        return Source(SourceKind.BOUNDARY, self.name)


@dataclass(frozen=True)
class StageGraph:
    """A stage as a program of its own, with one typing per region. numbers: which instance of the
    whole program each one is, or is reduced from. arrives: its stage boundary; leaves: that of the
    next stage. Outputs of `folded`: first what leaves, then what the model returns, in the last
    stage.
    """

    folded: FoldedGraph
    typings: tuple[RegionTyping, ...]
    numbers: tuple[int, ...]
    arrives: tuple[StageBoundaryValue, ...]
    leaves: tuple[StageBoundaryValue, ...]


def stage_graphs(
    folded: FoldedGraph, typings: Sequence[RegionTyping], first: Sequence[int]
) -> tuple[StageGraph, ...]:
    """The stages of `folded`. first: first instance of each stage, ascending from 0.

    Raises OptionError where a stage reads a buffer that another one updates."""
    _check_updates(folded, first)
    ends = [*first[1:], len(folded.instances)]
    boundaries = [*_boundaries(folded, typings, first), ()]
    return tuple(
        _Stage(folded, typings, range(begin, end), boundaries[s], boundaries[s + 1]).graph(
            is_first=begin == 0, is_last=end == len(folded.instances)
        )
        for s, (begin, end) in enumerate(zip(first, ends, strict=True))
    )


def _check_updates(folded: FoldedGraph, first: Sequence[int]) -> None:
    """A device that only reads a buffer would not see what another one writes into it."""
    readers: dict[str, set[int]] = {}
    updated: dict[str, str] = {}
    for k, instance in enumerate(folded.instances):
        graph = folded.regions[instance.region].graph
        for source in instance.sources:
            if source.kind is SourceKind.BUFFER:
                readers.setdefault(source.name, set()).add(bisect_right(first, k))
        for slot, value in graph.mutations:
            place = op_place(folded, instance.region, graph.producers[value])
            updated[instance.sources[slot].name] = place
    for name, place in updated.items():
        if len(readers[name]) > 1:
            raise OptionError(
                f"buffer {name}, which {place} updates, is read in {len(readers[name])} stages; "
                "plan fewer stages, or none"
            )


def _boundaries(
    folded: FoldedGraph, typings: Sequence[RegionTyping], first: Sequence[int]
) -> list[tuple[StageBoundaryValue, ...]]:
    """What crosses into each stage."""
    crossing: list[list[StageBoundaryValue]] = [[] for _ in first]
    for (producer, output), reader in crossing_readers(folded, is_returned=True).items():
        region = folded.instances[producer].region
        graph = folded.regions[region].graph
        value = graph.values[graph.outputs[output]]
        crosses = StageBoundaryValue(producer, output, value, typings[region].outputs[output])
        for stage, begin in enumerate(first):
            if producer < begin <= reader:
                crossing[stage].append(crosses)
    return [tuple(values) for values in crossing]


class _Stage:
    """Writes the program of the instances `own`."""

    def __init__(
        self,
        folded: FoldedGraph,
        typings: Sequence[RegionTyping],
        own: range,
        arrives: tuple[StageBoundaryValue, ...],
        leaves: tuple[StageBoundaryValue, ...],
    ) -> None:
        self.folded = folded
        self.typings = typings
        self.own = own
        self.arrives = arrives
        self.leaves = leaves
        self.arriving = {(b.instance, b.output): b for b in arrives}
        self.recomputed = self._recomputed_outputs()
        """Earlier instances, each with its outputs that this stage computes for itself."""
        self.numbers = {k: n for n, k in enumerate([*sorted(self.recomputed), *own])}
        self.regions: list[Region] = []
        self.region_typings: list[RegionTyping] = []
        self._known: dict[tuple[int, tuple[int, ...] | None], int] = {}

    def graph(self, *, is_first: bool, is_last: bool) -> StageGraph:
        """The finished stage. The first one also has what nobody reads."""
        instances = [
            self._reduced(k, tuple(sorted(self.recomputed[k]))) for k in sorted(self.recomputed)
        ]
        instances += [self._own(k) for k in self.own]
        used = _read_by(instances)
        if is_first:
            names = {p.name for p in self.folded.parameters}
            names |= {b.name for b in self.folded.buffers}
            used |= names - _read_by(self.folded.instances)
        outputs = [self._output(value) for value in self.leaves]
        if is_last:
            outputs += [replace(o, source=self._moved(o.source)) for o in self.folded.outputs]
        program = replace(
            self.folded,
            regions=tuple(self.regions),
            instances=tuple(instances),
            parameters=tuple(p for p in self.folded.parameters if p.name in used),
            buffers=tuple(b for b in self.folded.buffers if b.name in used),
            outputs=tuple(outputs),
        )
        typings, numbers = tuple(self.region_typings), tuple(self.numbers)
        return StageGraph(program, typings, numbers, self.arrives, self.leaves)

    def _output(self, of: StageBoundaryValue) -> OutputInfo:
        source = self._moved(Source(SourceKind.VALUE, "", of.instance, of.output))
        return OutputInfo(of.name, source, of.value.shape, of.value.dtype)

    def _recomputed_outputs(self) -> dict[int, set[int]]:
        """Outputs of each earlier instance that do not cross and are read here."""
        wanted: dict[int, set[int]] = {}

        def want(source: Source) -> None:
            is_earlier = source.kind is SourceKind.VALUE and source.instance < self.own.start
            if is_earlier and (source.instance, source.output) not in self.arriving:
                wanted.setdefault(source.instance, set()).add(source.output)

        for k in self.own:
            for source in self.folded.instances[k].sources:
                want(source)
        for k in reversed(range(self.own.start)):
            if k in wanted:
                instance = self.folded.instances[k]
                graph = self.folded.regions[instance.region].graph
                for slot in _needed(graph, wanted[k])[1]:
                    want(instance.sources[slot])
        return wanted

    def _own(self, k: int) -> Instance:
        instance = self.folded.instances[k]
        region = self._region(instance.region, None)
        return replace(instance, region=region, sources=tuple(map(self._moved, instance.sources)))

    def _reduced(self, k: int, outputs: tuple[int, ...]) -> Instance:
        instance = self.folded.instances[k]
        _, slots = _needed(self.folded.regions[instance.region].graph, outputs)
        sources = tuple(self._moved(instance.sources[slot]) for slot in slots)
        return replace(instance, region=self._region(instance.region, outputs), sources=sources)

    def _region(self, number: int, outputs: tuple[int, ...] | None) -> int:
        """The number here of a region, with all outputs or reduced to some."""
        if (number, outputs) not in self._known:
            self._known[number, outputs] = len(self.regions)
            region, typing = self.folded.regions[number], self.typings[number]
            if outputs is not None:
                graph, typing = _reduced_region(region.graph, typing, outputs)
                region = Region(f"{region.name}_again", graph)
            self.regions.append(region)
            self.region_typings.append(typing)
        return self._known[number, outputs]

    def _moved(self, source: Source) -> Source:
        """A source of the whole program as this stage reads it."""
        if source.kind is not SourceKind.VALUE:
            return source
        key = source.instance, source.output
        if key in self.arriving:
            return self.arriving[key].source
        output = source.output
        if source.instance in self.recomputed:
            output = sorted(self.recomputed[source.instance]).index(output)
        return replace(source, instance=self.numbers[source.instance], output=output)


def _read_by(instances: Iterable[Instance]) -> set[str]:
    """Names of the parameters and buffers that instances read."""
    kinds = (SourceKind.PARAMETER, SourceKind.BUFFER)
    return {s.name for i in instances for s in i.sources if s.kind in kinds}


def _needed(graph: OpGraph, outputs: Sequence[int] | set[int]) -> tuple[list[int], list[int]]:
    """(ops, slots) that lead to some outputs, ascending."""
    values = {graph.outputs[n] for n in outputs}
    ops = []
    for k in reversed(range(len(graph.ops))):
        if values.intersection(graph.ops[k].outputs):
            values.update(graph.ops[k].operands)
            ops.append(k)
    return ops[::-1], [i for i in range(len(graph.slots)) if i in values]


def _reduced_region(
    graph: OpGraph, typing: RegionTyping, outputs: tuple[int, ...]
) -> tuple[OpGraph, RegionTyping]:
    """A region that computes some of its outputs and no more, and updates no buffer."""
    ops, slots = _needed(graph, outputs)
    order = [*slots, *(v for k in ops for v in graph.ops[k].outputs)]
    number = {v: n for n, v in enumerate(order)}
    reduced = OpGraph(
        slots=tuple(graph.slots[i] for i in slots),
        values=tuple(graph.values[v] for v in order),
        ops=tuple(with_own_draw(graph.ops[k], k).renumbered(number) for k in ops),
        outputs=tuple(number[graph.outputs[n]] for n in outputs),
    )
    reduced_typing = RegionTyping(
        slots=tuple(typing.slots[i] for i in slots),
        ops=tuple(typing.ops[k] for k in ops),
        outputs=tuple(typing.outputs[n] for n in outputs),
    )
    return reduced, reduced_typing
