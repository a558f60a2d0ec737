"""Which products of a region take rows of other ranks as they come round (passes.ring_graph).

Those that are faster so than after a gather, or before a scatter, that is waited for. Regions are
emitted with them in one part and simulated, those first in which the step spends most; what makes
the whole step faster, and still fits, stays.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from meshfold.codegen.emit.region import Written
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.errors import OptionError
from meshfold.ir.op_graph import FoldedGraph, OpGraph
from meshfold.ir.options import RING, CompileOptions
from meshfold.ir.plan import Plan
from meshfold.ir.strategy import Parts, RegionTyping
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.collective_matmul.rewrite import RingGroup, in_ring_order, ring_groups
from meshfold.passes.graph.variants import planned_graph
from meshfold.passes.planner.check import typed_rules
from meshfold.passes.price.conversions import conversion_cost
from meshfold.passes.price.op_time import op_time
from meshfold.passes.rules.ops.collective_matmul import RING_RULES
from meshfold.passes.split.chunk_graph import UncutError
from meshfold.passes.split.micro_chunks import PartsProblem
from meshfold.refine.micro_chunks import by_time, is_better
from meshfold.refine.program_events import with_program_events


def with_ring(plan: Plan, folded: FoldedGraph, options: CompileOptions) -> Plan:
    """`plan` with products in a ring where that pays, and with the events and the simulated step of
    such a program. folded: the captured model; options: with what is pinned.

    Raises OptionError where it is pinned and no region can run so.
    """
    pinned = options.ring_pin
    if pinned and plan.schedule:
        raise OptionError(
            f"pin {RING}=1: stages of a pipeline do not have products in a ring; leave one of the "
            "two out"
        )
    if pinned is False or plan.events is None:
        return plan
    problem, probe = _RingProblem(plan, folded), OpProber()
    if pinned:
        return with_program_events(_pinned(plan, problem), folded, problem.costs, probe)
    best = plan
    for region in by_time(plan):
        # Beside parts, which hide collectives themselves, only where these are pinned.
        parts = Parts() if options.parts_pin is None else best.regions[region].parts
        if ring := problem.paying(region, parts):
            found = _with(best, region, parts, ring)
            found = with_program_events(found, folded, problem.costs, probe)
            best = found if is_better(found, best) else best
    return best


@dataclass(frozen=True)
class _RingProblem:
    """The products of a plan's regions. folded: the captured model."""

    plan: Plan
    folded: FoldedGraph

    @cached_property
    def costs(self) -> CostModel:
        return CostModel(self.plan.cluster, self.plan.mesh)

    @cached_property
    def _split(self) -> FoldedGraph:
        return planned_graph(self.folded, self.plan)

    @cached_property
    def _parts(self) -> PartsProblem:
        return PartsProblem(self._split, self.plan)

    def possible(self, region: int, parts: Parts) -> tuple[int, ...]:
        """Numbers of the groups of a region in parts that can be in a ring together."""
        found = self._together(region, parts)
        return tuple(range(len(found[0]))) if found else ()

    def paying(self, region: int, parts: Parts) -> tuple[int, ...]:
        """Those that are faster than their collective and products one after the other."""
        together = self._together(region, parts)
        if together is None:
            return ()
        groups, in_ring = together
        graph, typing = self._written(region, parts)
        apart_s = self._seconds(graph, typing)
        pairs = zip(in_ring[0].ops, self._seconds(*in_ring), strict=True)
        ring_s = (seconds for op, seconds in pairs if op.target in RING_RULES)
        found = []
        for number in sorted(range(len(groups)), key=lambda k: groups[k].at):
            group, value = groups[number], graph.values[groups[number].value]
            moved_s = conversion_cost(value, *group.edge, self.plan.mesh, self.costs).total_s
            if next(ring_s) < moved_s + sum(apart_s[k] for k in group.ops):
                found.append(number)
        return tuple(sorted(found))

    def _together(self, region: int, parts: Parts) -> tuple[tuple[RingGroup, ...], Written] | None:
        """The groups of a region in parts, and what it is with all of them in a ring, if it can."""
        written, mesh = self._written(region, parts), self.plan.mesh
        groups = ring_groups(*written, mesh)
        try:
            return (groups, in_ring_order(*written, mesh, groups)) if groups else None
        except UncutError:
            return None

    def _written(self, region: int, parts: Parts) -> Written:
        typing = self.plan.regions[region].typing
        if parts.count > 1:
            return self._parts.in_parts(region, typing, parts)
        return self._split.regions[region].graph, typing

    def _seconds(self, graph: OpGraph, typing: RegionTyping) -> list[float]:
        """Per op, forward and backward, with what it communicates inside."""
        rules = typed_rules(graph, typing, "", self.plan.mesh)
        mesh, costs = self.plan.mesh, self.costs
        return [
            op_time(graph, op, of_axes, mesh, costs).total_s
            for op, of_axes in zip(graph.ops, rules, strict=True)
        ]


def _pinned(plan: Plan, problem: _RingProblem) -> Plan:
    """Every product of every region that can be in a ring."""
    found = plan
    for number, region in enumerate(plan.regions):
        found = _with(found, number, region.parts, problem.possible(number, region.parts))
    if found == plan:
        raise OptionError(
            f"pin {RING}=1: no product reads rows that ranks gather, or makes some that they "
            "scatter; that takes tensor parallel layers between sequence shards (pins tp, sp=1)"
        )
    return found


def _with(plan: Plan, region: int, parts: Parts, ring: tuple[int, ...]) -> Plan:
    regions = list(plan.regions)
    regions[region] = replace(regions[region], parts=parts, ring=ring)
    return replace(plan, regions=tuple(regions))
