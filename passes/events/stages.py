"""The events of a program with microbatches, stage by stage (cost_models/simulation/pipeline.py).

Regions are written twice, for the microbatches at the edges of a step and for those between; a
stage is some consecutive instances of them. What a stage has in memory outside of the instance that
runs is not among its events (passes/pipeline/device_memory.py).
"""

from collections.abc import Sequence
from itertools import pairwise

from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.cost_models.simulation.pipeline import StageEvents
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.step_events import CollectiveEvent, RegionEvents, StepEvents
from meshfold.ir.strategy import RegionTyping
from meshfold.passes.events.program import reduced_at_end, written_regions
from meshfold.passes.events.region import Microbatch
from meshfold.passes.graph.reads import program_reads
from meshfold.passes.memory.local_program import Probe
from meshfold.passes.memory.region import GradientsOf, MemoryModel
from meshfold.passes.price.region import RegionPricer


class StageWriter:
    """folded: of one microbatch of a rank; typings, pricers: per region, on the mesh of one stage,
    which costs are of; first: the first instance of each stage; splits: whether the schedule has
    gradients of weights apart."""

    def __init__(
        self,
        folded: FoldedGraph,
        typings: Sequence[RegionTyping],
        pricers: Sequence[RegionPricer],
        costs: CostModel,
        probe: Probe,
        *,
        first: Sequence[int],
        num_microbatches: int,
        splits: bool,
    ) -> None:
        model, reads = MemoryModel(costs, probe), program_reads(folded)
        self._program = folded, typings, pricers, model, reads
        self._costs = costs
        self._first = (*first, len(folded.instances))
        self._is_only = num_microbatches == 1
        self._gradients: GradientsOf = "put off" if splits else "microbatch"
        if self._is_only and not splits:
            self._gradients = "one pass"

    def write(self) -> list[StageEvents]:
        """The events of every stage."""
        kind = Microbatch.ONLY if self._is_only else Microbatch.EDGE
        edge, numbers = written_regions(*self._program, kind, self._gradients)
        inner = edge
        if not self._is_only:
            inner, _ = written_regions(*self._program, Microbatch.INNER, self._gradients)
        edge_regions, inner_regions = (tuple(r.events for r in of) for of in (edge, inner))
        found = []
        for start, end in pairwise(self._first):
            own = tuple(numbers[start:end])
            trailing = reduced_at_end(edge, own, self._costs)
            found.append(
                StageEvents(
                    self._events(edge_regions, own, trailing),
                    self._events(inner_regions, own, trailing if self._is_only else ()),
                    put_off=tuple(inner[r].put_off for r in own),
                )
            )
        return found

    def write_first(self) -> list[StepEvents] | None:
        """The events of every stage around the first backward of several, before which there are no
        gradients; None where they are those of other microbatches."""
        if self._gradients != "microbatch":
            return None
        written, numbers = written_regions(*self._program, Microbatch.BEGUN)
        regions = tuple(r.events for r in written)
        spans = pairwise(self._first)
        return [self._events(regions, tuple(numbers[a:b])) for a, b in spans]

    def _events(
        self,
        regions: tuple[RegionEvents, ...],
        instances: tuple[int, ...],
        trailing: tuple[CollectiveEvent, ...] = (),
    ) -> StepEvents:
        return StepEvents(
            regions=regions,
            instances=instances,
            trailing=trailing,
            optimizer_s=0.0,
            resident_bytes=(0,) * (2 * len(instances) + 1),
            fixed_bytes=0,
            slowdown=self._costs.cluster.overlap_slowdown,
            adds_shards=not self._is_only,
        )
