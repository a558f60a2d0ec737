"""Prices and bytes of the regions of a typed program, worked out for those that somebody asks for.

Bytes, and what selective recomputation keeps, ask an op probe for every new size of a microbatch,
which costs as much as typing; what seconds alone rule out never needs them.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from meshfold.cost_models.memory.live_ranges import RegionMemory
from meshfold.ir.op_graph import FoldedGraph, SourceKind
from meshfold.ir.strategy import KeptResults, Recompute
from meshfold.passes.memory.kept_results import Selective
from meshfold.passes.memory.local_program import Probe
from meshfold.passes.memory.region import MemoryModel
from meshfold.passes.price.region import RegionPrice
from meshfold.passes.region.search import RegionSolution
from meshfold.passes.region.typing import MeshSearch


class RegionFigures:
    """What the regions of a typed program take and hold, worked out where it is asked for."""

    def __init__(
        self,
        folded: FoldedGraph,
        search: MeshSearch,
        solutions: Sequence[RegionSolution],
        recomputes: Sequence[Recompute],
        probe: Probe,
    ) -> None:
        self._folded, self._solutions, self._recomputes = folded, solutions, recomputes
        self._model = MemoryModel(search.costs, probe)
        self._floats = {i.region: i.floats for i in reversed(folded.instances)}
        self._memories: dict[tuple[int, Recompute], RegionMemory] = {}
        self._chosen: dict[int, Selective] = {}

    def price(self, region: int, recompute: Recompute) -> RegionPrice:
        """Of a region by number, given what is recomputed."""
        solution = self._solutions[region]
        added = self._selective(region).price if recompute == "selective" else None
        return solution.pricer.price(solution.typing.slots, recompute, selective=added)

    def kept(self, region: int) -> KeptResults:
        """By selective recomputation."""
        return self._selective(region).kept

    def memory(self, region: int, recompute: Recompute) -> RegionMemory:
        """Of a region by number, given what is recomputed."""
        key = region, recompute
        if key not in self._memories:
            typing = replace(self._solutions[region].typing, recompute=recompute)
            if recompute == "selective":
                typing = replace(typing, kept=self.kept(region))
            graph = self._folded.regions[region].graph
            self._memories[key] = self._model.region(graph, typing, self._floats[region])
        return self._memories[key]

    def _selective(self, region: int) -> Selective:
        if region not in self._chosen:
            solution, graph = self._solutions[region], self._folded.regions[region].graph
            floats = self._floats[region]
            found = self._model.selective(graph, solution.typing, floats, solution.pricer)
            self._chosen[region] = found
        return self._chosen[region]

    def saved_output_bytes(self, region: int) -> int:
        """Bytes of a region's outputs that a reader saves for its backward in any case."""
        return self._saved_outputs[region]

    @cached_property
    def _saved_outputs(self) -> list[int]:
        saved: list[dict[int, int]] = [{} for _ in self._folded.regions]
        for instance in self._folded.instances:
            readers = [self.memory(instance.region, x) for x in self._recomputes]
            for slot, source in enumerate(instance.sources):
                if source.kind is not SourceKind.VALUE:
                    continue
                if any(slot in memory.saved_slots for memory in readers):
                    maker = self._folded.instances[source.instance].region
                    made = [self.memory(maker, x).output_bytes for x in self._recomputes]
                    saved[maker][source.output] = max(sizes[source.output] for sizes in made)
        return [sum(outputs.values()) for outputs in saved]
