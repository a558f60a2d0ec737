"""The events of a program with microbatches, stage by stage (cost_models/simulation/pipeline.py).

Regions are written twice, for the microbatches at the edges of a step and for those between; a
stage is some consecutive instances of them. What a stage has in memory is not among its events: the
search has it (passes/stages).
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
from meshfold.passes.memory.region import MemoryModel
from meshfold.passes.price.region import RegionPricer


def stage_events(
    folded: FoldedGraph,
    typings: Sequence[RegionTyping],
    pricers: Sequence[RegionPricer],
    costs: CostModel,
    probe: Probe,
    *,
    first: Sequence[int],
    num_microbatches: int,
) -> list[StageEvents]:
    """The events of every stage. folded: of one microbatch of a rank; typings, pricers: per region,
    on the mesh of one stage, which costs are of; first: the first instance of each stage."""
    of_program = folded, typings, pricers, MemoryModel(costs, probe), program_reads(folded)
    is_only = num_microbatches == 1
    edge, numbers = written_regions(*of_program, Microbatch.ONLY if is_only else Microbatch.EDGE)
    inner = edge if is_only else written_regions(*of_program, Microbatch.INNER)[0]
    edge_regions, inner_regions = (tuple(r.events for r in of) for of in (edge, inner))
    found = []
    for start, end in pairwise((*first, len(folded.instances))):
        own = tuple(numbers[start:end])
        trailing = reduced_at_end(edge, own, costs)
        found.append(
            StageEvents(
                _events(edge_regions, own, trailing, costs),
                _events(inner_regions, own, trailing if is_only else (), costs),
            )
        )
    return found


def _events(
    regions: tuple[RegionEvents, ...],
    instances: tuple[int, ...],
    trailing: tuple[CollectiveEvent, ...],
    costs: CostModel,
) -> StepEvents:
    return StepEvents(
        regions=regions,
        instances=instances,
        trailing=trailing,
        optimizer_s=0.0,
        resident_bytes=(0,) * (2 * len(instances) + 1),
        fixed_bytes=0,
        slowdown=costs.cluster.overlap_slowdown,
    )
