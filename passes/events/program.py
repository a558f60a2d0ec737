"""The events of a whole program (meshfold.ir.step_events): regions written once, then strung
together.

What memory/region.py knows of memory between instances comes along, so that the simulator's
peak is that of the memory model, at a moment of the step.
"""

from collections import Counter
from collections.abc import Sequence

from meshfold.cost_models.memory.step_memory import resident_over_time
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.op_graph import FoldedGraph, SourceKind
from meshfold.ir.spmd import Layout
from meshfold.ir.step_events import CollectiveEvent, StepEvents
from meshfold.ir.strategy import Offload, RegionTyping
from meshfold.passes.events.region import Microbatch, PricedRegion, collective, region_events
from meshfold.passes.graph.reads import ProgramReads, program_reads
from meshfold.passes.memory.local_program import Probe
from meshfold.passes.memory.region import GradientsOf, MemoryModel
from meshfold.passes.memory.zero import program_states
from meshfold.passes.price.region import RegionPricer


def program_events(
    folded: FoldedGraph,
    typings: Sequence[RegionTyping],
    pricers: Sequence[RegionPricer],
    costs: CostModel,
    probe: Probe,
    *,
    optimizer: str,
    optimizer_s: float,
    offloads: Sequence[Offload] | None = None,
    memory_model: MemoryModel | None = None,
    reads: ProgramReads | None = None,
) -> StepEvents:
    """The events of a step in one pass. typings, pricers: per region. optimizer_s: seconds of its
    update, and of what the step waits for the host. offloads: per region; None: nothing on hosts.
    memory_model, reads: if at hand."""
    reads = reads or program_reads(folded)
    memory_model = memory_model or MemoryModel(costs, probe)
    # One that meshes with other replicas share has the bytes of these, but not their conversions.
    is_own = memory_model.costs.mesh == costs.mesh
    tracing = memory_model if is_own else MemoryModel(costs, probe)
    written, numbers = written_regions(folded, typings, pricers, tracing, reads)
    states = program_states(folded, typings, costs.mesh, offloads, reads, optimizer=optimizer)
    memory = memory_model.instances(folded, typings, offloads, reads)
    outputs = [
        (o.source.instance, o.source.output)
        for o in folded.outputs
        if o.source.kind is SourceKind.VALUE
    ]
    return StepEvents(
        regions=tuple(region.events for region in written),
        instances=tuple(numbers),
        trailing=reduced_at_end(written, numbers, costs),
        optimizer_s=optimizer_s,
        resident_bytes=resident_over_time(memory, outputs, states),
        fixed_bytes=states.parameters
        + states.buffers
        + states.inputs
        + states.update.state_bytes
        + costs.cluster.reserve_bytes,
        slowdown=costs.cluster.overlap_slowdown,
    )


def written_regions(
    folded: FoldedGraph,
    typings: Sequence[RegionTyping],
    pricers: Sequence[RegionPricer],
    model: MemoryModel,
    reads: ProgramReads,
    microbatch: Microbatch = Microbatch.ONLY,
    gradients: GradientsOf = "one pass",
) -> tuple[list[PricedRegion], list[int]]:
    """(events per region and layouts that arrive, number of them per instance). model, microbatch,
    gradients: as for region_events."""
    regions: dict[tuple[int, tuple[Layout, ...]], int] = {}
    written: list[PricedRegion] = []
    numbers = []
    for instance, of in zip(folded.instances, reads.instances, strict=True):
        r = instance.region
        layouts = list(typings[r].slots)
        for slot, (maker, output) in of.values.items():
            layouts[slot] = typings[folded.instances[maker].region].outputs[output]
        key = r, tuple(layouts)
        if key not in regions:
            variant = sum(region == r for region, _ in regions)
            regions[key] = len(written)
            name = folded.regions[r].name + (f".{variant}" if variant else "")
            of_region = typings[r], key[1], pricers[r], model, instance.floats
            written.append(region_events(name, *of_region, microbatch, gradients))
        numbers.append(regions[key])
    return written, numbers


def reduced_at_end(
    written: Sequence[PricedRegion], numbers: Sequence[int], costs: CostModel
) -> tuple[CollectiveEvent, ...]:
    """The collectives of the gradients that instances, by number of what is written, leave to the
    end: one for all alike in axes and dtype."""
    at_end: Counter[tuple[tuple[int, ...], str]] = Counter()
    for number, count in Counter(numbers).items():
        for where, num_bytes in written[number].reduced_at_end.items():
            at_end[where] += count * num_bytes
    return tuple(
        collective("all_reduce", num_bytes, axes, costs.storage)
        for (axes, _), num_bytes in at_end.items()
    )
