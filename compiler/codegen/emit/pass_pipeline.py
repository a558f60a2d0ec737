"""From a captured graph and a plan to the program of a rank: the passes, in order.

    emit        typed graphs, conversions, buckets, gathers ahead   meshfold.codegen.emit.region
    parts       regions that run in parts, anew                     meshfold.passes.split.micro_chunks
    ring        products that take rows as they come round, anew    meshfold.passes.collective_matmul.rewrite
    schedule    pieces in an order found with the cost model        meshfold.schedule_program
    merge       gathers and reductions that run as one,             meshfold.ir.bucketing
                all-reduces that run in phases                      meshfold.ir.node_groups

They start from the captured graph with its regions split as the plan does (passes/variants.py).
After each one the program is checked (meshfold.codegen.emit.check_program). `watch` sees every pass with its
seconds and what it made; `meshfold graph --passes DIR` writes that down.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshfold.codegen.emit.check_program import check_program
from meshfold.codegen.emit.region import Written, check_runs, emit_typed
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.node_groups import Hierarchy, node_levels
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.plan import Plan
from meshfold.ir.strategy import RegionTyping
from meshfold.passes.chained_chunks.software_pipeline import LineOrders
from meshfold.passes.collective_matmul.rewrite import in_planned_ring
from meshfold.passes.graph.variants import planned_graph
from meshfold.passes.split.micro_chunks import PartsProblem, parted
from meshfold.schedule_program import scheduled

Watch = Callable[["PassRun"], None]


@dataclass(frozen=True)
class PassRun:
    """A pass that ran: its place among all, its name, its seconds, the program behind it."""

    number: int
    name: str
    seconds: float
    program: EmittedProgram


@dataclass(frozen=True)
class Subject:
    """What is emitted. split: the captured graph with its regions as the plan has them; costs: of
    the plan's cluster and mesh; known: orders that schedules of other plans have found."""

    split: FoldedGraph
    plan: Plan
    costs: CostModel
    known: LineOrders | None = None

    @property
    def typings(self) -> list[RegionTyping]:
        return [region.typing for region in self.plan.regions]

    @cached_property
    def in_parts(self) -> dict[int, Written]:
        """What regions are written as that run in parts, by number."""
        problem = PartsProblem(self.split, self.plan)
        return {
            k: parted(problem, k, region.typing, region.parts)
            for k, region in enumerate(self.plan.regions)
            if region.parts.count > 1
        }

    def in_ring(self) -> dict[int, Written]:
        """The same, with products that take rows as they come round where the plan says so."""
        found = dict(self.in_parts)
        for k, region in enumerate(self.plan.regions):
            if region.ring:
                written = found.get(k, (self.split.regions[k].graph, region.typing))
                found[k] = in_planned_ring(*written, region, self.plan.mesh)
        return found


@dataclass(frozen=True)
class EmissionPass:
    """run: (program so far, subject) -> program. mode: in which it runs; "" in every."""

    name: str
    run: Callable[[EmittedProgram | None, Subject], EmittedProgram]
    mode: str = ""


def _emit(_: EmittedProgram | None, of: Subject) -> EmittedProgram:
    return emit_typed(of.split, of.typings, of.plan.mesh, of.costs)


def _parts(program: EmittedProgram | None, of: Subject) -> EmittedProgram:
    assert program is not None, "there is something to emit anew"
    if not of.in_parts:
        return program
    return emit_typed(of.split, of.typings, of.plan.mesh, of.costs, written=of.in_parts)


def _ring(program: EmittedProgram | None, of: Subject) -> EmittedProgram:
    assert program is not None, "there is something to emit anew"
    if not any(region.ring for region in of.plan.regions):
        return program
    return emit_typed(of.split, of.typings, of.plan.mesh, of.costs, written=of.in_ring())


def _schedule(program: EmittedProgram | None, of: Subject) -> EmittedProgram:
    """What gradients of weights may hold longer than without is what the plan leaves of memory."""
    assert program is not None, "there is something to schedule"
    left_bytes = max(0, of.plan.memory.capacity - of.plan.memory.peak)
    return scheduled(program, of.costs, left_bytes, of.known)


def _merge(program: EmittedProgram | None, of: Subject) -> EmittedProgram:
    assert program is not None, "there are collectives to merge"
    return merged(program, of.plan)


def merged(program: EmittedProgram, plan: Plan) -> EmittedProgram:
    """`program` with collectives merged, and in phases, as the plan says."""
    hierarchy = None
    if plan.hierarchy_bytes:
        hierarchy = Hierarchy(node_levels(plan.cluster, plan.mesh), plan.hierarchy_bytes)
    return replace(
        program,
        merge_bytes=plan.merge_bytes,
        merge_gather_bytes=plan.merge_gather_bytes,
        hierarchy=hierarchy,
    )


PASSES: tuple[EmissionPass, ...] = (
    EmissionPass("emit", _emit),
    EmissionPass("parts", _parts, "scheduled"),
    EmissionPass("ring", _ring),
    EmissionPass("schedule", _schedule, "scheduled"),
    EmissionPass("merge", _merge),
)


def emit(
    folded: FoldedGraph,
    plan: Plan,
    watch: Watch | None = None,
    passes: Sequence[EmissionPass] = PASSES,
    costs: CostModel | None = None,
    known: LineOrders | None = None,
) -> EmittedProgram:
    """The program of every rank of `plan.mesh`, of a plan that runs every batch in one pass.
    costs: of its cluster and mesh, if at hand; known: see Subject.

    Raises PlanMismatchError if the plan's regions are not those of `folded`, or if it uses what can
    be planned but not run; PassError where a pass breaks what must hold.
    """
    check_runs(plan)
    split = planned_graph(folded, plan)
    subject = Subject(split, plan, costs or CostModel(plan.cluster, plan.mesh), known)
    program: EmittedProgram | None = None
    ran = [one for one in passes if one.mode in ("", plan.mode)]
    for number, one in enumerate(ran, 1):
        start = time.perf_counter()
        program = one.run(program, subject)
        seconds = time.perf_counter() - start
        check_program(program, one.name)
        if watch is not None:
            watch(PassRun(number, one.name, seconds, program))
    assert program is not None, "there are passes"
    return program
