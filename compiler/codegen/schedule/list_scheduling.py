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
from meshfold.ir.op_graph import OpGraph
from meshfold.ir.strategy import RegionTyping
from meshfold.ops.conversions import STARTS
from meshfold.passes.rules.typed import typed_rules
from meshfold.passes.schedule.list_schedule import list_order

Orders = tuple[tuple[RegionAction, ...], tuple[RegionAction, ...]]
"""Actions of the forward and of the backward."""


class KnownCosts:
    """Costs of the segments of regions, by their graphs and typings; the mesh is the same for
    all."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[OpGraph, RegionTyping, SegmentCosts]] = {}

    def of(self, graph: OpGraph, typing: RegionTyping, name: str, costs: CostModel) -> SegmentCosts:
        """Costs of the region of that name. Raises PlanMismatchError, as typed_rules."""
        key = id(graph), id(typing)
        if key not in self._known:
            rules = typed_rules(graph, typing, name, costs.mesh)
            self._known[key] = graph, typing, SegmentCosts(graph, rules, costs)
        return self._known[key][-1]


def scheduled(
    program: EmittedProgram,
    costs: CostModel,
    bound_bytes: int,
    without: Collection[int] = (),
    known: KnownCosts | None = None,
) -> EmittedProgram:
    """`program` with a schedule for every region that communicates inside, but for those `without`;
    what only gathers and reduces its parameters does that in eager mode just so. bound_bytes: what
    may be saved for deferred gradients; known: as for costs_of_regions."""
    regions = list(program.regions)
    waiting = [k for k, of in enumerate(regions) if communicates(of) and k not in without]
    for k, segment_costs in enumerate(costs_of_regions(program, costs, known)):
        if k in waiting:
            graph = segmented_graph(regions[k].graph.graph)
            of = segmented(regions[k], segment_costs, graph)
            schedule = region_schedule(of, listed(of, bound_bytes))
            regions[k] = replace(regions[k], schedule=schedule)
    return replace(program, regions=tuple(regions))


def communicates(region: RegionProgram) -> bool:
    """Whether a region has collectives inside."""
    return any(node.target in STARTS for node in region.graph.graph.nodes)


def costs_of_regions(
    program: EmittedProgram, costs: CostModel, known: KnownCosts | None = None
) -> Iterator[SegmentCosts]:
    """What the segments of every region of `program` cost. known: of programs with the same
    regions, to which these are added."""
    known = known or KnownCosts()
    for region in program.regions:
        yield known.of(region.ops, region.typing, region.name, costs)


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
    deferred_s = {k: seconds for k, (seconds, *_) in of.deferred.items()}
    deferred_bytes = {k: more for k, (_, _, more) in of.deferred.items()}
    return RegionSchedule(of.graph, deferred_s, deferred_bytes, *orders)
