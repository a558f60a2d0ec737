"""Which values stages hand each other, and which each makes for itself.

    made of parameters and the batch         cross, with their gradients
    made of inputs and constants alone       computed again in every stage that reads them: masks
                                             and positions of a padded batch, which is there anyway
    not of the batch at all                  computed again, too (rotary tables, position biases)

Random numbers cross: they are drawn once. So does what is made of a buffer that a step updates, be
it of parameters alone (a weight under spectral norm): no other stage has the buffer as it is.
"""

from collections.abc import Iterator

from meshfold.ir.op_graph import Dependence, FoldedGraph, OpGraph, Source, SourceKind
from meshfold.passes.rules.ops.random import RANDOM_OPS

Made = tuple[int, int]
"""(instance, output)."""


def crossing_values(folded: FoldedGraph) -> frozenset[Made]:
    """The outputs of instances that cross stage boundaries where a later stage reads them."""
    needs = [list(_needs(region.graph)) for region in folded.regions]
    updated = {
        instance.sources[slot].name
        for instance in folded.instances
        for slot, _ in folded.regions[instance.region].graph.mutations
    }
    crossing: set[Made] = set()

    def is_at_hand(source: Source) -> bool:
        if source.kind is SourceKind.VALUE:
            return (source.instance, source.output) in again
        return source.kind is not SourceKind.PARAMETER and source.name not in updated

    def is_updated(source: Source) -> bool:
        if source.kind is SourceKind.VALUE:
            return (source.instance, source.output) in of_updated
        return source.name in updated

    again: set[Made] = set()
    of_updated: set[Made] = set()
    for k, instance in enumerate(folded.instances):
        graph = folded.regions[instance.region].graph
        for output, (slots, draws) in enumerate(needs[instance.region]):
            if not draws and all(is_at_hand(instance.sources[slot]) for slot in slots):
                again.add((k, output))
                continue
            if any(is_updated(instance.sources[slot]) for slot in slots):
                of_updated.add((k, output))
            is_of_batch = graph.values[graph.outputs[output]].depends is Dependence.BATCH
            if is_of_batch or (k, output) in of_updated:
                crossing.add((k, output))
    return frozenset(crossing)


def crossing_readers(folded: FoldedGraph, *, is_returned: bool) -> dict[Made, int]:
    """The last instance that reads each of these. is_returned: what the program returns is read
    behind all of them."""
    last: dict[Made, int] = {}
    for k, instance in enumerate(folded.instances):
        for source in instance.sources:
            if source.kind is SourceKind.VALUE:
                last[source.instance, source.output] = k
    for result in folded.outputs if is_returned else ():
        if result.source.kind is SourceKind.VALUE:
            last[result.source.instance, result.source.output] = len(folded.instances)
    crossing = crossing_values(folded)
    return {made: reader for made, reader in sorted(last.items()) if made in crossing}


def _needs(graph: OpGraph) -> Iterator[tuple[list[int], bool]]:
    """Per output the slots that lead to it, and whether random numbers do."""
    for v in graph.outputs:
        values, draws = {v}, False
        for op in reversed(graph.ops):
            if not values.isdisjoint(op.outputs):
                values.update(op.operands)
                draws = draws or op.target in RANDOM_OPS
        yield [i for i in range(len(graph.slots)) if i in values], draws
