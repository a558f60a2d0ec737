"""The number of micro-chunks of each region in a scheduled program (passes.split.micro_chunks).

Every number of micro-chunks is emitted, scheduled and simulated, region by region, those first in
which the step spends most; a number is taken where the whole step is faster for it and still fits.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from meshfold.codegen.emit.pass_pipeline import emit
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.errors import OptionError
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import MICRO_CHUNKS
from meshfold.ir.plan import Plan
from meshfold.ir.strategy import ChunkDim, Chunking
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.chained_chunks import ChainedOrders
from meshfold.passes.graph.variants import planned_graph
from meshfold.passes.split.chunk_graph import ChunkingError
from meshfold.passes.split.micro_chunks import ChunkingProblem
from meshfold.refine.program_events import with_program_events

TRIED = (2, 4)
LEAST_GAIN = 0.002
"""Fraction of the step; less is not worth graphs of twice the size."""


def with_micro_chunks(plan: Plan, folded: FoldedGraph, pinned: int | None) -> Plan:
    """`plan` in mode scheduled with the micro-chunks of every region, and with the events and the
    simulated step of its schedule. folded: the captured model.
    pinned: how many to take wherever it is possible.

    Raises OptionError where no region can run in as many micro-chunks as pinned.
    """
    if pinned is not None and pinned > 1 and plan.schedule:
        raise OptionError(
            f"pin {MICRO_CHUNKS}={pinned}: stages of a pipeline do not run in micro-chunks; "
            "leave one of the two out"
        )
    costs = CostModel(plan.cluster, plan.mesh)
    probe, known = OpProber(), ChainedOrders()
    best = with_program_events(plan, folded, costs, probe, known)
    if best.mode != "scheduled" or best.events is None or pinned == 1:
        return best
    problem = ChunkingProblem(planned_graph(folded, plan), plan)
    if pinned is not None:
        return with_program_events(_pinned(best, problem, pinned), folded, costs, probe, known)
    program = emit(folded, plan, costs=costs, known=known)
    waiting = {r.region for r in program.regions if r.schedule is not None}
    for region in filter(waiting.__contains__, by_time(best)):
        for chunking in _possible(best, problem, region):
            tried = _with(best, region, chunking)
            found = with_program_events(tried, folded, costs, probe, known)
            # Where two chunks do not pay four may: more hides, and weights are read as often again.
            if is_better(found, best):
                best = found
    return best


def is_better(found: Plan, best: Plan) -> bool:
    assert found.simulated is not None and best.simulated is not None
    gains = found.simulated.step_s < best.simulated.step_s * (1 - LEAST_GAIN)
    return gains and found.simulated.peak_bytes <= found.memory.capacity


def by_time(plan: Plan) -> list[int]:
    """Numbers of the regions, those with most seconds of the step first."""
    spent = [r.num_instances * (r.forward_s + r.backward_s) for r in plan.regions]
    return sorted(range(len(spent)), key=lambda k: (-spent[k], k))


def _possible(plan: Plan, problem: ChunkingProblem, region: int) -> Iterator[Chunking]:
    """The micro-chunks in which a region can run: of its samples, where that is possible, else of
    its sequence, which leaves attention unsplit."""
    found = False
    for of in get_args(ChunkDim):
        for count in TRIED if not found else ():
            try:
                problem.chunked(region, plan.regions[region].typing, Chunking(count, of))
            except ChunkingError:
                break
            found = True
            yield Chunking(count, of)


def _with(plan: Plan, region: int, chunking: Chunking) -> Plan:
    regions = list(plan.regions)
    regions[region] = replace(regions[region], chunking=chunking)
    return replace(plan, regions=tuple(regions))


def _pinned(plan: Plan, problem: ChunkingProblem, count: int) -> Plan:
    """Every region in as many micro-chunks that can run so."""
    why = ""
    found = plan
    for region in by_time(plan):
        for of in get_args(ChunkDim):
            try:
                problem.chunked(region, plan.regions[region].typing, Chunking(count, of))
            except ChunkingError as error:
                why = why or f"region {plan.regions[region].name}: {error}"
            else:
                found = _with(found, region, Chunking(count, of))
                break
    if found is plan:
        raise OptionError(f"pin {MICRO_CHUNKS}={count}: no region can run so ({why})")
    return found
