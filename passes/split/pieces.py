"""Regions in pieces, so that a pipeline can divide what repeats less often than it has stages.

    U-Net, one region A      Aaa Aab Aba Abb     any stretch of ops may be a stage
    two layers B B           Ba Bb Ba Bb         pieces of equal layers are equal

The region with the most work is cut in two, where the fewest bytes cross between a third and two
thirds of its work, until there are as many pieces as are wanted. A plan says how many ops each
layer has then. Values that many pieces later are read (skip connections) cross all
boundaries between, as any value does.

An op keeps the numbers that it draws: those of its place in the program that was not cut.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from meshfold.cost_models.op_costs.compute import op_work
from meshfold.ir.op_graph import (
    FoldedGraph,
    Instance,
    OpGraph,
    Region,
    Slot,
    SlotKind,
    Source,
    SourceKind,
)
from meshfold.passes.rules.ops.random import with_own_draw
from meshfold.passes.split.loss_counts import takes_mean

PIECES_PER_STAGE = 3
"""So many layers or pieces per stage are wanted, that the search has a choice of boundaries."""
LEAST_SHARE = 3
"""Either part of a region has at least 1 / LEAST_SHARE of its work, where a cut allows it."""


@dataclass(frozen=True)
class Pieces:
    """numbers: per instance of `folded` the instance of the uncut program that it is of."""

    folded: FoldedGraph
    numbers: tuple[int, ...]


def in_pieces(folded: FoldedGraph, num_stages: int) -> Pieces:
    """`folded` as it can be divided into stages: as it is where enough of it repeats."""
    instances = [i.region for i in folded.instances]
    repeated = sum(1 for r in instances if instances.count(r) > 1)
    is_enough = num_stages == 1 or repeated >= num_stages
    wanted = 0 if is_enough else PIECES_PER_STAGE * num_stages
    pieces = _uncut(folded)
    work: dict[str, float] = {}
    """By name of a region; -1 of one that cannot be cut."""
    while len(pieces.folded.instances) < wanted:
        regions = pieces.folded.regions
        for region in regions:
            if region.name not in work:
                work[region.name] = sum(_work(region.graph))
        largest = max(range(len(regions)), key=lambda r: (work[regions[r].name], -r))
        if work[regions[largest].name] < 0:
            break
        ends = (pieces.folded.instances[0].region, pieces.folded.instances[-1].region)
        at = _place(regions[largest].graph, ends[0] == largest, ends[1] == largest)
        if at:
            pieces = _halved(pieces, largest, at)
        else:
            work[regions[largest].name] = -1.0
    return pieces


def sizes_of(folded: FoldedGraph) -> tuple[int, ...]:
    """How many ops every instance has."""
    return tuple(len(folded.regions[i.region].graph.ops) for i in folded.instances)


def cut_as(folded: FoldedGraph, num_ops: Sequence[int]) -> Pieces:
    """`folded` with instances of so many ops each, in order; as it is for no numbers, and for those
    of another program."""
    cuts: dict[int, list[int]] = {}
    waiting = list(reversed(num_ops))
    for instance in folded.instances:
        graph = folded.regions[instance.region].graph
        ends: list[int] = []
        while waiting and sum(ends[-1:]) < len(graph.ops):
            ends.append(sum(ends[-1:]) + waiting.pop())
        is_as_others = cuts.setdefault(instance.region, ends) == ends
        if ends[-1:] != [len(graph.ops)] or not is_as_others or not _keeps_losses(graph, ends):
            return _uncut(folded)
    if waiting or min(num_ops, default=0) < 1:
        return _uncut(folded)
    return cut_at(folded, cuts)


def cut_at(folded: FoldedGraph, cuts: Mapping[int, Sequence[int]]) -> Pieces:
    """`folded` with regions in parts. cuts: by region where its parts end, in ops, the last one
    included."""
    pieces = _uncut(folded)
    for region in sorted(cuts, reverse=True):
        for n, (begin, end) in enumerate(pairwise([0, *cuts[region][:-1]])):
            pieces = _halved(pieces, region + n, end - begin)
    return pieces


def _uncut(folded: FoldedGraph) -> Pieces:
    return Pieces(folded, folded.numbers or tuple(range(len(folded.instances))))


def _keeps_losses(graph: OpGraph, ends: Sequence[int]) -> bool:
    """Whether losses whose targets are counted, told apart by uncut instance and op, stay in one
    part."""
    return len({bisect_right(ends, k) for k, op in enumerate(graph.ops) if takes_mean(op)}) <= 1


def _work(graph: OpGraph) -> list[float]:
    """How much each op does: floating-point operations forward and backward, and the bytes of its
    results, of which one counts as much as an operation."""
    found = []
    for op in graph.ops:
        work = op_work(graph, op)
        made = sum(graph.values[v].num_bytes for v in op.outputs)
        found.append(float(work.flops + work.backward_flops + made))
    return found


def _place(graph: OpGraph, is_first: bool, is_last: bool) -> int:
    """How many ops the first part of a region has; 0 where it is not cut. Neither the first part of
    a program nor its last is without parameters: a stage of it would leave an optimizer none."""
    work, crossing = _work(graph), _crossing_bytes(graph)
    total, done = sum(work), 0.0
    possible = []
    reads = [any(_is_parameter(graph, v) for v in op.operands) for op in graph.ops]
    for k in range(1, len(graph.ops)):
        done += work[k - 1]
        trains = (any(reads[:k]) or not is_first) and (any(reads[k:]) or not is_last)
        if trains and _keeps_losses(graph, (k,)):
            share = min(done, total - done) / total if total else 0.0
            possible.append((min(share, 1 / LEAST_SHARE), -crossing[k], share, -k))
    return -max(possible)[3] if possible else 0


def _is_parameter(graph: OpGraph, v: int) -> bool:
    return v < len(graph.slots) and graph.slots[v].kind is SlotKind.PARAMETER


def _crossing_bytes(graph: OpGraph) -> list[int]:
    """Bytes that are made before op k and read from it on, for every k."""
    last = {v: len(graph.ops) for v in graph.outputs}
    for k, op in enumerate(graph.ops):
        for v in op.operands:
            last[v] = max(k, last.get(v, 0))
    change = [0] * (len(graph.ops) + 2)
    for v, reader in last.items():
        if (producer := graph.producers[v]) >= 0:
            change[producer + 1] += graph.values[v].num_bytes
            change[reader + 1] -= graph.values[v].num_bytes
    crossing, now = [], 0
    for step in change[:-1]:
        now += step
        crossing.append(now)
    return crossing


@dataclass(frozen=True)
class _Part:
    """Some ops of a region as a region of their own. slots: per slot the value of the region that
    it takes; outputs: per output the value that it is."""

    graph: OpGraph
    slots: tuple[int, ...]
    outputs: tuple[int, ...]


def _halved(pieces: Pieces, region: int, at: int) -> Pieces:
    """With every instance of a region in two parts, the first of `at` ops."""
    folded = pieces.folded
    graph, name = folded.regions[region].graph, folded.regions[region].name
    parts = _parts(graph, at)
    regions = [*folded.regions[:region], *folded.regions[region + 1 :]]
    number = {r: r - (r > region) for r in range(len(folded.regions)) if r != region}
    named = zip((f"{name}a", f"{name}b"), parts, strict=True)
    regions[region:region] = [Region(n, part.graph) for n, part in named]
    number = {r: n + (n >= region) * 2 for r, n in number.items()}
    place: dict[int, tuple[int, ...]] = {}
    instances: list[Instance] = []
    numbers: list[int] = []

    def moved(source: Source) -> Source:
        if source.kind is not SourceKind.VALUE:
            return source
        maker = folded.instances[source.instance].region
        if maker != region:
            return replace(source, instance=place[source.instance][0])
        value = graph.outputs[source.output]
        return _made(parts, value, place[source.instance])

    for k, instance in enumerate(folded.instances):
        sources = tuple(map(moved, instance.sources))
        first = len(instances)
        if instance.region != region:
            place[k] = (first,)
            instances.append(replace(instance, region=number[instance.region], sources=sources))
            numbers.append(pieces.numbers[k])
            continue
        place[k] = first, first + 1
        for n, part in enumerate(parts):
            own = tuple(
                sources[v] if v < len(sources) else _made(parts, v, place[k]) for v in part.slots
            )
            instances.append(replace(instance, region=region + n, sources=own))
            numbers.append(pieces.numbers[k])
    outputs = tuple(replace(o, source=moved(o.source)) for o in folded.outputs)
    cut = replace(folded, regions=tuple(regions), instances=tuple(instances), outputs=outputs)
    return Pieces(cut, tuple(numbers))


def _made(parts: tuple[_Part, ...], value: int, instances: tuple[int, ...]) -> Source:
    """Where a value of the uncut region leaves one of its parts."""
    for part, k in zip(parts, instances, strict=True):
        if value in part.outputs:
            return Source(SourceKind.VALUE, instance=k, output=part.outputs.index(value))
    raise AssertionError("a value that is read is an output of the part that makes it")


def _parts(graph: OpGraph, at: int) -> tuple[_Part, _Part]:
    """The first `at` ops of a region, and the rest. An output that no op makes leaves the first."""
    is_first = [graph.producers[v] < at for v in range(len(graph.values))]
    read_later = {v for op in graph.ops[at:] for v in op.operands}
    updates = [[m for m in graph.mutations if is_first[m[1]] == first] for first in (True, False)]
    passed = {v for v in read_later if is_first[v] and graph.producers[v] >= 0}
    leaving = sorted(passed.union(v for v in graph.outputs if is_first[v]))
    rest = sorted(v for v in graph.outputs if not is_first[v])
    # In the order of values, which is the same in whatever order a region is cut.
    return (
        _part(graph, range(at), tuple(leaving), updates[0]),
        _part(graph, range(at, len(graph.ops)), tuple(rest), updates[1]),
    )


def _part(
    graph: OpGraph, ops: range, outputs: tuple[int, ...], updates: list[tuple[int, int]]
) -> _Part:
    made = [v for k in ops for v in graph.ops[k].outputs]
    read = {v for k in ops for v in graph.ops[k].operands}
    read |= {*outputs, *(x for update in updates for x in update)}
    slots = tuple(sorted(read.difference(made)))
    number = {v: n for n, v in enumerate((*slots, *made))}
    part = OpGraph(
        tuple(graph.slots[v] if v < len(graph.slots) else Slot(SlotKind.VALUE) for v in slots),
        tuple(graph.values[v] for v in number),
        tuple(with_own_draw(graph.ops[k], k).renumbered(number) for k in ops),
        tuple(number[v] for v in outputs),
        tuple((number[slot], number[v]) for slot, v in updates),
    )
    return _Part(part, slots, outputs)
