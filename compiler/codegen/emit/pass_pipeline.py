"""The passes from a captured graph and a plan to the program of a rank, in order.

    emit        typed graphs, conversions, groups, gathers ahead   meshfold.codegen.emit.region
    micro_chunks        regions in micro-chunks             meshfold.passes.split.micro_chunks
    collective_matmul   products as collective matmuls      meshfold.passes.collective_matmul
    schedule    segments in an order found with the cost model
                                                                    meshfold.codegen.schedule.list_scheduling
    chain       chunked regions, across their boundaries            meshfold.codegen.chained_chunks
    bucket      coalesced gathers and reductions, hierarchical      meshfold.ir.bucketing,
                all-reduces                                         meshfold.ir.node_groups

They start from the captured graph with its regions split as the plan does
(passes/graph/variants.py). After each one the program is checked
(meshfold.codegen.emit.check_program). `watch` sees every pass with its seconds and its result;
`meshfold graph --passes DIR` writes that down.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshfold.codegen.chained_chunks import chunked_regions, with_chained_chunks
from meshfold.codegen.emit.check_program import check_program
from meshfold.codegen.emit.memo import EmissionMemo
from meshfold.codegen.emit.region import Written, check_runs, emit_typed
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.codegen.schedule.list_scheduling import scheduled
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.hierarchical_all_reduce import HierarchicalAllReduce
from meshfold.ir.node_groups import node_levels
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.plan import Plan
from meshfold.ir.strategy import RegionTyping
from meshfold.passes.collective_matmul import with_planned_matmuls
from meshfold.passes.graph.variants import (
    offloaded_parameters,
    parameters_by_layer,
    planned_graph,
    regions_saved_on_host,
)
from meshfold.passes.split.micro_chunks import ChunkingProblem, planned_chunks

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
    the plan's cluster and mesh; memo: of other emissions of the plan."""

    split: FoldedGraph
    plan: Plan
    costs: CostModel
    memo: EmissionMemo | None = None

    @property
    def typings(self) -> list[RegionTyping]:
        return [region.typing for region in self.plan.regions]

    @property
    def left_bytes(self) -> int:
        """What the plan leaves of memory, for what deferred gradients of weights wait for."""
        return self.plan.memory.left

    @cached_property
    def chunked(self) -> dict[int, Written]:
        """Regions in micro-chunks, by number."""
        problem = self.memo.chunking if self.memo else ChunkingProblem(self.split, self.plan)
        return {
            k: planned_chunks(problem, k, region.typing, region.chunking)
            for k, region in enumerate(self.plan.regions)
            if region.chunking.count > 1
        }

    def with_matmuls(self) -> dict[int, Written]:
        """The same, with collective matmuls where the plan has them."""
        found = dict(self.chunked)
        for k, region in enumerate(self.plan.regions):
            if region.collective_matmul:
                written = found.get(k, (self.split.regions[k].graph, region.typing))
                found[k] = with_planned_matmuls(*written, region, self.plan.mesh)
        return found


@dataclass(frozen=True)
class EmissionPass:
    """run: (program so far, subject) -> program. mode: in which it runs; "" in every."""

    name: str
    run: Callable[[EmittedProgram | None, Subject], EmittedProgram]
    mode: str = ""


def _emit(_: EmittedProgram | None, of: Subject) -> EmittedProgram:
    return emit_typed(of.split, of.typings, of.costs)


def _micro_chunks(program: EmittedProgram | None, of: Subject) -> EmittedProgram:
    assert program is not None, "there is something to emit anew"
    if not of.chunked:
        return program
    return emit_typed(of.split, of.typings, of.costs, written=of.chunked)


def _collective_matmul(program: EmittedProgram | None, of: Subject) -> EmittedProgram:
    assert program is not None, "there is something to emit anew"
    if not any(region.collective_matmul for region in of.plan.regions):
        return program
    return emit_typed(of.split, of.typings, of.costs, written=of.with_matmuls())


def _schedule(program: EmittedProgram | None, of: Subject) -> EmittedProgram:
    assert program is not None, "there is something to schedule"
    without = chunked_regions(program) if of.plan.chained_chunks else ()
    known = of.memo.segments if of.memo else None
    return scheduled(program, of.costs, of.left_bytes, without, known)


def _chain(program: EmittedProgram | None, of: Subject) -> EmittedProgram:
    assert program is not None, "there is something to chain"
    if not of.plan.chained_chunks:
        return program
    known = (of.memo.chained, of.memo.segments) if of.memo else (None, None)
    return with_chained_chunks(program, of.costs, of.left_bytes, *known)


def _bucket(program: EmittedProgram | None, of: Subject) -> EmittedProgram:
    assert program is not None, "there are collectives to bucket"
    offloaded = offloaded_parameters(of.split, of.plan)
    saved = regions_saved_on_host(of.plan)
    return replace(
        bucketed(program, of.plan),
        offloaded=offloaded,
        by_layer=parameters_by_layer(of.split, of.plan),
        saved_on_host=saved,
    )


def bucketed(program: EmittedProgram, plan: Plan) -> EmittedProgram:
    """`program` with the buckets and hierarchical all-reduces of the plan."""
    hierarchical = None
    if plan.hierarchical_all_reduce_bytes:
        hierarchical = HierarchicalAllReduce(
            node_levels(plan.cluster, plan.mesh), plan.hierarchical_all_reduce_bytes
        )
    return replace(
        program,
        reduce_bucket_bytes=plan.reduce_bucket_bytes,
        allgather_bucket_bytes=plan.allgather_bucket_bytes,
        hierarchical=hierarchical,
    )


PASSES: tuple[EmissionPass, ...] = (
    EmissionPass("emit", _emit),
    EmissionPass("micro_chunks", _micro_chunks, "scheduled"),
    EmissionPass("collective_matmul", _collective_matmul),
    EmissionPass("schedule", _schedule, "scheduled"),
    EmissionPass("chain", _chain, "scheduled"),
    EmissionPass("bucket", _bucket),
)


def emit(
    folded: FoldedGraph,
    plan: Plan,
    watch: Watch | None = None,
    passes: Sequence[EmissionPass] = PASSES,
    memo: EmissionMemo | None = None,
) -> EmittedProgram:
    """The program of every rank of `plan.mesh`, of a plan that runs every batch in one pass.
    memo: of other emissions of it, to which this one is added.

    Raises PlanMismatchError if the plan's regions are not those of `folded`, or if it uses what can
    be planned but not run; PassError where a pass breaks what must hold.
    """
    check_runs(plan)
    split = memo.split if memo else planned_graph(folded, plan)
    costs = memo.costs if memo else CostModel(plan.cluster, plan.mesh)
    subject = Subject(split, plan, costs, memo)
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
