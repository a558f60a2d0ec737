"""The order of the segments of every region of an emitted program
(meshfold.codegen.program.region_schedule). Costs are the plan's, so all ranks find the same."""

from collections.abc import Collection, Iterator
from dataclasses import replace

from meshfold.codegen.program.emitted import EmittedProgram, RegionProgram
from meshfold.codegen.program.region_schedule import RegionAction, RegionSchedule
from meshfold.codegen.schedule.direction_tasks import backward_tasks, forward_tasks
from meshfold.codegen.schedule.segment_costs import SegmentCosts
from meshfold.codegen.schedule.segmented_region import SegmentedRegion, segmented
from meshfold.codegen.schedule.segments import segmented_graph
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ops.conversions import STARTS
from meshfold.passes.rules.typed import typed_rules
from meshfold.passes.schedule.list_schedule import list_order

Orders = tuple[tuple[RegionAction, ...], tuple[RegionAction, ...]]
"""Actions of the forward and of the backward."""


def scheduled(
    program: EmittedProgram, costs: CostModel, bound_bytes: int, without: Collection[int] = ()
) -> EmittedProgram:
    """`program` with a schedule for every region that communicates inside, but for those `without`;
    what only gathers and reduces its parameters does that in eager mode just so. bound_bytes: what
    may be saved for deferred gradients."""
    regions = list(program.regions)
    for k, segment_costs in enumerate(costs_of_regions(program, costs)):
        if communicates(regions[k]) and k not in without:
            graph = segmented_graph(regions[k].graph.graph)
            of = segmented(regions[k], segment_costs, graph)
            schedule = region_schedule(of, listed(of, bound_bytes))
            regions[k] = replace(regions[k], schedule=schedule)
    return replace(program, regions=tuple(regions))


def communicates(region: RegionProgram) -> bool:
    """Whether a region has collectives inside."""
    return any(node.target in STARTS for node in region.graph.graph.nodes)


def costs_of_regions(program: EmittedProgram, costs: CostModel) -> Iterator[SegmentCosts]:
    """What the segments of every region of `program` cost."""
    for region in program.regions:
        rules = typed_rules(region.ops, region.typing, region.name, costs.mesh)
        yield SegmentCosts(region.ops, rules, costs)


def listed(of: SegmentedRegion, bound_bytes: int) -> Orders:
    """Both orders of a region for itself."""
    found = []
    for direction in (forward_tasks(of), backward_tasks(of)):
        order = list_order(direction.tasks, bound_bytes)
        found.append(tuple(direction.actions[t] for t in order))
    forward, backward = found
    return forward, backward


def region_schedule(of: SegmentedRegion, orders: Orders) -> RegionSchedule:
    """The schedule of a region that runs in `orders`."""
    deferred_s = {k: seconds for k, (seconds, _) in of.deferred.items()}
    deferred_bytes = {k: saved_bytes for k, (_, saved_bytes) in of.deferred.items()}
    return RegionSchedule(of.graph, deferred_s, deferred_bytes, *orders)
