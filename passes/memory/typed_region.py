"""A region whose ops are typed, under what is recomputed of it: seconds, and bytes where they are
asked for.

Bytes, and what selective recomputation keeps, ask an op probe for every new size of a region, which
costs as much as typing; what seconds alone rule out never needs them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from meshfold.cost_models.memory.live_ranges import RegionMemory
from meshfold.ir.op_graph import FoldedGraph, OpGraph, SourceKind
from meshfold.ir.strategy import (
    BESIDE_SELECTIVE,
    SELECTIVE,
    KeptResults,
    Recompute,
    RegionTyping,
)
from meshfold.passes.memory.kept_results import Selective
from meshfold.passes.memory.region import MemoryModel
from meshfold.passes.price.region import RecomputePrice, RegionPrice, RegionPricer


@dataclass(frozen=True, eq=False)
class TypedRegion:
    """typing: every parameter is unsharded on dp. pricer: of its ops under the rules of these
    types. floats: bindings of an instance. keeps_all: selective recomputation drops nothing."""

    graph: OpGraph
    typing: RegionTyping
    pricer: RegionPricer
    model: MemoryModel
    floats: Sequence[float]
    keeps_all: bool = False
    _typings: dict[Recompute, RegionTyping] = field(default_factory=dict)
    _memories: dict[Recompute, RegionMemory] = field(default_factory=dict)

    def typed(self, recompute: Recompute) -> RegionTyping:
        """Its typing under what is recomputed."""
        if recompute not in self._typings:
            kept = self.kept(recompute)
            self._typings[recompute] = replace(self.typing, recompute=recompute, kept=kept)
        return self._typings[recompute]

    def price(self, recompute: Recompute) -> RegionPrice:
        """Of one instance."""
        return self.pricer.price(self.typing.slots, recompute, selective=self.added(recompute))

    def added(self, recompute: Recompute) -> RecomputePrice | None:
        """What selective recomputation adds to the backward; None for another."""
        return self._selective[recompute].price if recompute in SELECTIVE else None

    def memory(self, recompute: Recompute) -> RegionMemory:
        """Of one instance."""
        if recompute not in self._memories:
            typing = self.typed(recompute)
            self._memories[recompute] = self.model.region(self.graph, typing, self.floats)
        return self._memories[recompute]

    def kept(self, recompute: Recompute) -> KeptResults:
        """What selective recomputation keeps; nothing is said of another."""
        return self._selective[recompute].kept if recompute in SELECTIVE else KeptResults()

    def distinct(self, recomputes: Sequence[Recompute]) -> list[Recompute]:
        """Of `recomputes` those that differ here: light and heavy may be what selective is."""
        if "selective" not in recomputes:
            return list(recomputes)
        middle = self.kept("selective")
        return [x for x in recomputes if x not in BESIDE_SELECTIVE or self.kept(x) != middle]

    @cached_property
    def _selective(self) -> Mapping[Recompute, Selective]:
        of = self.graph, self.typing, self.floats, self.pricer
        return self.model.selective(*of, keeps_all=self.keeps_all)


def saved_output_bytes(
    folded: FoldedGraph, regions: Sequence[TypedRegion], recomputes: Sequence[Recompute]
) -> list[int]:
    """Bytes of each region's outputs that a reader saves for its backward in any case."""
    saved: list[dict[int, int]] = [{} for _ in folded.regions]
    reads = {
        (instance.region, slot, folded.instances[source.instance].region, source.output)
        for instance in folded.instances
        for slot, source in enumerate(instance.sources)
        if source.kind is SourceKind.VALUE
    }
    for reader, slot, maker, output in reads:
        if any(slot in regions[reader].memory(x).saved_slots for x in recomputes):
            made = [regions[maker].memory(x).output_bytes for x in recomputes]
            saved[maker][output] = max(sizes[output] for sizes in made)
    return [sum(outputs.values()) for outputs in saved]
