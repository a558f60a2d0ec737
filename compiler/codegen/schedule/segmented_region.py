"""A region in segments, with their costs and the gradients of weights that they defer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from meshfold.codegen.program.emitted import ORIGIN, PLACE, RegionProgram
from meshfold.codegen.program.region_schedule import RegionSegment, SegmentedGraph
from meshfold.codegen.schedule.segment_costs import SegmentCosts
from meshfold.codegen.schedule.split_backward import deferred_names, split_backward, weight_of
from meshfold.ir.op_graph import SlotKind
from meshfold.ir.spmd import Layout
from meshfold.passes.price.parameters import local_bytes

Deferred = tuple[float, int, Mapping[int, int]]
"""Of deferred gradients: seconds; bytes saved until they run; how much more these are than the
gradients, which come later, by number of the product."""


@dataclass(frozen=True)
class SegmentedRegion:
    """What the tasks of a region are written from."""

    region: RegionProgram
    costs: SegmentCosts
    graph: SegmentedGraph
    deferred: Mapping[int, Deferred]
    """By number of the segment."""

    @cached_property
    def readers(self) -> list[set[int]]:
        """The segments that read what a segment computes, by its number."""
        return self._readers(lambda segment: segment.inputs)

    @cached_property
    def deferred_readers(self) -> list[set[int]]:
        """The segments whose deferred gradients are those of what a segment computes: of a weight
        that is converted, or a view."""
        return self._readers(deferred_names)

    def groups_of(self, segment: RegionSegment) -> list[int]:
        """Parameter groups that a segment reads members of."""
        members = self.graph.members
        return sorted({members[name][0] for name in segment.inputs if name in members})

    def _readers(self, names: Callable[[RegionSegment], Iterable[str]]) -> list[set[int]]:
        found: list[set[int]] = [set() for _ in self.graph.segments]
        for k, segment in enumerate(self.graph.segments):
            for name in names(segment):
                if name in self.graph.makers:
                    found[self.graph.makers[name]].add(k)
        return found


def segmented(region: RegionProgram, costs: SegmentCosts, graph: SegmentedGraph) -> SegmentedRegion:
    """`region` with the segments `graph`, whose products defer gradients of weights where any
    collective could hide behind them: their graphs are changed."""
    collectives = [segment for segment in graph.segments if segment.kind != "ops"]
    communicates = any(costs.conversion(segment, 1)[1] for segment in collectives)
    return SegmentedRegion(region, costs, graph, _deferred(graph, costs) if communicates else {})


def _deferred(graph: SegmentedGraph, costs: SegmentCosts) -> dict[int, Deferred]:
    found: dict[int, Deferred] = {}
    has_gradient: set[int] = set()
    """Weights to whose gradients an earlier segment adds."""
    for k, segment in reversed(tuple(enumerate(graph.segments))):
        products = split_backward(segment.graph, costs.ops) if segment.kind == "ops" else []
        if not products:
            continue
        # Half of a product's backward computes the gradient of its weight.
        seconds = sum(costs.op_times[n.meta[ORIGIN]].backward_s / 2 for n in products)
        for weight in (weight_of(n).meta[PLACE] for n in products):
            seconds += costs.added_s(*weight) if weight[0] in has_gradient else 0.0
            has_gradient.add(weight[0])
        saved = _saved_by_product(products, costs)
        later = {n.meta[ORIGIN]: _bytes_of(weight_of(n).meta[PLACE], costs) for n in products}
        more = {number: max(0, saved[number] - later[number]) for number in saved}
        found[k] = seconds, sum(saved.values()), more
    return found


def _saved_by_product(products: Sequence[fx.Node], costs: SegmentCosts) -> dict[int, int]:
    """Bytes that are kept for deferred gradients of weights, by number of the product: its input
    and the gradient of its result, each with the first product that reads it in the backward."""
    found, places = dict[int, int](), set[tuple[int, Layout]]()
    slots = costs.ops.slots
    for product in reversed(products):
        num_bytes = 0
        for node in (product, *product.all_input_nodes):
            if PLACE not in node.meta or node.meta[PLACE] in places:
                continue
            v, layout = node.meta[PLACE]
            if v >= len(slots) or slots[v].kind is not SlotKind.PARAMETER:
                places.add((v, layout))
                num_bytes += _bytes_of((v, layout), costs)
        found[product.meta[ORIGIN]] = num_bytes
    return found


def _bytes_of(place: tuple[int, Layout], costs: SegmentCosts) -> int:
    v, layout = place
    return local_bytes(costs.ops.values[v], layout, costs.costs.mesh.sizes)
