"""Which products of a region are collective matmuls
(passes/collective_matmul/rewrite.py).

Those that are faster than their collective and products one after the other, or all of a region
where some are: one after the other is an estimate. Regions are emitted with them unchunked and
simulated, those first in which the step spends most; what makes the whole step faster, and still
fits, stays.
"""

from dataclasses import dataclass, replace

from meshfold.codegen.emit.memo import EmissionMemo
from meshfold.codegen.emit.region import Written
from meshfold.errors import OptionError
from meshfold.ir.op_graph import FoldedGraph, OpGraph
from meshfold.ir.options import COLLECTIVE_MATMUL, CompileOptions
from meshfold.ir.plan import Plan
from meshfold.ir.strategy import Chunking, RegionTyping
from meshfold.passes.collective_matmul import MatmulGroup, matmul_groups, with_collective_matmuls
from meshfold.passes.price.conversions import conversion_cost
from meshfold.passes.price.op_time import op_time
from meshfold.passes.rules.ops.collective_matmul import COLLECTIVE_MATMUL_RULES
from meshfold.passes.rules.typed import typed_rules
from meshfold.passes.split.chunk_graph import ChunkingError
from meshfold.refine.micro_chunks import by_time, is_better
from meshfold.refine.program_events import with_program_events


def with_collective_matmul(
    plan: Plan, folded: FoldedGraph, options: CompileOptions, memo: EmissionMemo | None = None
) -> Plan:
    """`plan` with collective matmuls where they pay, and with the events and the simulated step of
    such a program. folded: the captured model; options: with what is pinned; memo: as for emit.

    Raises OptionError where it is pinned and no region can run so.
    """
    pinned = options.collective_matmul_pin
    if pinned and plan.schedule:
        raise OptionError(
            f"pin {COLLECTIVE_MATMUL}=1: stages of a pipeline do not have collective matmuls; "
            "leave one of the two out"
        )
    if pinned is False or plan.events is None:
        return plan
    memo = memo or EmissionMemo(folded, plan)
    problem = _Problem(plan, memo)
    if pinned:
        return with_program_events(_pinned(plan, problem), folded, memo)
    best = plan
    for region in by_time(plan):
        # Micro-chunks hide collectives themselves: both together only where these are pinned.
        chunking = Chunking() if options.micro_chunks_pin is None else best.regions[region].chunking
        paying = problem.paying(region, chunking)
        choices = dict.fromkeys((paying, problem.possible(region, chunking))) if paying else ()
        for matmuls in choices:
            found = _with(best, region, chunking, matmuls)
            found = with_program_events(found, folded, memo)
            best = found if is_better(found, best) else best
    return best


@dataclass(frozen=True)
class _Problem:
    """The products of a plan's regions."""

    plan: Plan
    memo: EmissionMemo

    def possible(self, region: int, chunking: Chunking) -> tuple[int, ...]:
        """Numbers of a region's groups that can be collective matmuls together."""
        found = self._together(region, chunking)
        return tuple(range(len(found[0]))) if found else ()

    def paying(self, region: int, chunking: Chunking) -> tuple[int, ...]:
        """Those that are faster than their collective and products one after the other."""
        together = self._together(region, chunking)
        if together is None:
            return ()
        groups, fused = together
        graph, typing = self._written(region, chunking)
        apart_s = self._seconds(graph, typing)
        pairs = zip(fused[0].ops, self._seconds(*fused), strict=True)
        fused_s = (seconds for op, seconds in pairs if op.target in COLLECTIVE_MATMUL_RULES)
        found = []
        for number in sorted(range(len(groups)), key=lambda k: groups[k].at):
            group, value = groups[number], graph.values[groups[number].value]
            moved_s = conversion_cost(value, *group.edge, self.memo.costs).total_s
            if next(fused_s) < moved_s + sum(apart_s[k] for k in group.ops):
                found.append(number)
        return tuple(sorted(found))

    def _together(
        self, region: int, chunking: Chunking
    ) -> tuple[tuple[MatmulGroup, ...], Written] | None:
        """A region's groups, and it with all of them as collective matmuls; None if it cannot."""
        written, mesh = self._written(region, chunking), self.plan.mesh
        groups = matmul_groups(*written, mesh)
        try:
            return (groups, with_collective_matmuls(*written, mesh, groups)) if groups else None
        except ChunkingError:
            return None

    def _written(self, region: int, chunking: Chunking) -> Written:
        typing = self.plan.regions[region].typing
        if chunking.count > 1:
            return self.memo.chunking.chunked(region, typing, chunking)
        return self.memo.split.regions[region].graph, typing

    def _seconds(self, graph: OpGraph, typing: RegionTyping) -> list[float]:
        """Seconds of each op, forward and backward, with the collectives inside it."""
        rules = typed_rules(graph, typing, "", self.plan.mesh)
        return [
            op_time(graph, op, of_axes, self.memo.costs).total_s
            for op, of_axes in zip(graph.ops, rules, strict=True)
        ]


def _pinned(plan: Plan, problem: _Problem) -> Plan:
    """Every product of every region that can be one."""
    found = plan
    for number, region in enumerate(plan.regions):
        found = _with(found, number, region.chunking, problem.possible(number, region.chunking))
    if found == plan:
        raise OptionError(
            f"pin {COLLECTIVE_MATMUL}=1: no matrix product reads rows that ranks gather, or makes "
            "some that they scatter; that takes tensor parallel layers between sequence shards "
            "(pins tp, sp=1)"
        )
    return found


def _with(plan: Plan, region: int, chunking: Chunking, matmuls: tuple[int, ...]) -> Plan:
    regions = list(plan.regions)
    regions[region] = replace(regions[region], chunking=chunking, collective_matmul=matmuls)
    return replace(plan, regions=tuple(regions))
