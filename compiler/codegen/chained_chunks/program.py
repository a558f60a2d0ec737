"""Chunked regions of a program, scheduled across their boundaries."""

from collections.abc import Mapping
from dataclasses import replace

from meshfold.codegen.chained_chunks.boundaries import chunked_boundaries, is_chunked
from meshfold.codegen.chained_chunks.region import chunked_schedule
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.codegen.schedule.list_scheduling import KnownCosts, costs_of_regions
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.passes.chained_chunks import ChainedOrders


def chunked_regions(program: EmittedProgram) -> tuple[int, ...]:
    """Numbers of the regions that with_chained_chunks schedules."""
    return tuple(k for k, region in enumerate(program.regions) if is_chunked(program, region))


def with_chained_chunks(
    program: EmittedProgram,
    costs: CostModel,
    bound_bytes: int,
    known: ChainedOrders | None,
    segments: KnownCosts | None = None,
) -> EmittedProgram:
    """`program` with a schedule for every chunked region, and what crosses boundaries in chunks.
    bound_bytes: what may be saved for deferred gradients; known: orders that were found before;
    segments: as for costs_of_regions."""
    boundaries = chunked_boundaries(program)
    chained: dict[int, Mapping[int, int]] = {k: {} for k in chunked_regions(program)}
    for k, boundary in enumerate(boundaries):
        if boundary.received and program.programs[k] == program.programs[k - 1]:
            chained[program.programs[k]] = dict(boundary.received)
    known = {} if known is None else known
    regions = list(program.regions)
    for k, segment_costs in enumerate(costs_of_regions(program, costs, segments)):
        if k in chained:
            arguments = segment_costs, bound_bytes, chained[k], known
            regions[k] = replace(regions[k], schedule=chunked_schedule(regions[k], *arguments))
    return replace(program, regions=tuple(regions), boundaries=boundaries)
