"""Region boundaries: which slots and outputs carry one value, and in which layout it crosses.

Conversions are inside regions, so a value leaves its producer in the layout in which every
consumer takes it. Slots and outputs that are linked by some instance form a class with one layout:

    slot (region, i) ~ output (region', k)   when an instance takes slot i from output k
    slot (region, i) ~ model input           when an instance takes slot i from it

A run of equal layers links its output to its own slot, so what is carried along keeps its layout.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from networkx.utils import UnionFind

from meshfold.ir.op_graph import Dependence, FoldedGraph, OutputInfo, SourceKind, Value
from meshfold.ir.spmd import INVARIANT, Shard, SpmdType


@dataclass(frozen=True)
class Boundaries:
    """slots[r][i]: class of slot i of region r, None for what does not cross (parameters, buffers,
    constants); outputs[r][k]: class of output k. values[c] is the tensor of class c.

    inputs: classes that hold a model input; results: classes that hold a model output. apart: those
    of them that no region reads, and that are no loss; free: those of these that may leave as
    shards.
    """

    slots: tuple[tuple[int | None, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    values: tuple[Value, ...]
    inputs: frozenset[int]
    results: frozenset[int]
    apart: frozenset[int] = frozenset()
    free: frozenset[int] = frozenset()


def find_boundaries(folded: FoldedGraph) -> Boundaries:
    """The classes of a folded program, numbered by first appearance."""
    classes: UnionFind[Hashable] = UnionFind()
    for key, source in _links(folded):
        classes.union(key, source)
    numbers: dict[Hashable, int] = {}
    values: list[Value] = []

    def number(key: Hashable, value: Value) -> int:
        root = classes[key]
        if root not in numbers:
            numbers[root] = len(values)
            values.append(value)
        return numbers[root]

    crossing = {key for key, _ in _links(folded)}
    slots, outputs = [], []
    for r, region in enumerate(folded.regions):
        graph = region.graph
        slots.append(
            tuple(
                number(("slot", r, i), graph.values[i]) if ("slot", r, i) in crossing else None
                for i in range(len(graph.slots))
            )
        )
        outputs.append(
            tuple(number(("out", r, k), graph.values[v]) for k, v in enumerate(graph.outputs))
        )
    inputs = (numbers.get(classes["input", i.name]) for i in folded.inputs)

    def classes_of(infos: Iterable[OutputInfo]) -> frozenset[int]:
        sources = (o.source for o in infos if o.source.kind is SourceKind.VALUE)
        return frozenset(outputs[folded.instances[s.instance].region][s.output] for s in sources)

    apart = classes_of(folded.apart)
    return Boundaries(
        tuple(slots),
        tuple(outputs),
        tuple(values),
        frozenset(c for c in inputs if c is not None),
        classes_of(folded.outputs),
        apart,
        apart if folded.returns.sharded else frozenset(),
    )


def _links(folded: FoldedGraph) -> Iterator[tuple[Hashable, Hashable]]:
    """(slot key, key of what feeds it), once per instance and slot that crosses a boundary."""
    for instance in folded.instances:
        for i, source in enumerate(instance.sources):
            slot = ("slot", instance.region, i)
            if source.kind is SourceKind.VALUE:
                yield slot, ("out", folded.instances[source.instance].region, source.output)
            elif source.kind is SourceKind.INPUT:
                yield slot, ("input", source.name)


def batch_type(value: Value, batch_size: int, axis_size: int) -> SpmdType:
    """Type of a model input on the data parallel axis: cut along dim 0 when that is the batch."""
    if value.shape and value.shape[0] == batch_size and batch_size % axis_size == 0:
        return Shard(0)
    return INVARIANT


def sequence_type(value: Value, batch: SpmdType, axis_size: int) -> SpmdType:
    """Type of a carried activation under sequence parallelism: the first dim that is not the batch,
    of float values of rank 3 and more that depend on the batch; Invariant where it does not
    divide. batch: the value's type on the data parallel axis."""
    if not value.is_float or value.depends is not Dependence.BATCH or len(value.shape) < 3:
        return INVARIANT
    dim = 1 if batch.dim in (-1, 0) else 0
    return Shard(dim) if value.shape[dim] % axis_size == 0 else INVARIANT


def carried_sequences(folded: FoldedGraph) -> frozenset[int]:
    """Sizes of the sequences that pass between regions: the dim after the batch, of trained values
    of rank 3."""
    found = find_boundaries(folded)
    inside = (c for c in range(len(found.values)) if c not in found.inputs | found.results)
    values = (found.values[c] for c in inside)
    return frozenset(v.shape[1] for v in values if v.requires_grad and len(v.shape) == 3)


def carries_feature_maps(folded: FoldedGraph) -> bool:
    """Whether trained values of rank 4 and more pass between regions, as images in a network of
    convolutions do. What is alike for all samples, T5's position bias, is none."""
    found = find_boundaries(folded)
    inside = [v for c, v in enumerate(found.values) if c not in found.inputs | found.results]
    return any(v.requires_grad and len(v.shape) > 3 and v.shape[0] > 1 for v in inside)


def num_instances(folded: FoldedGraph) -> Mapping[int, int]:
    """Region number -> how often it occurs."""
    counts = dict.fromkeys(range(len(folded.regions)), 0)
    for instance in folded.instances:
        counts[instance.region] += 1
    return counts
