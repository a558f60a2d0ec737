"""In how many parts the regions of a scheduled program run (passes.region_parts).

Every number of parts is emitted, scheduled and simulated, region by region, those first in which
the step spends most; a number stays where the whole step is faster for it and still fits.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from meshfold.codegen.emit.pass_pipeline import emit
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.errors import OptionError
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import PARTS
from meshfold.ir.plan import Plan
from meshfold.ir.strategy import Parts, PartsOf
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.chained_chunks.software_pipeline import LineOrders
from meshfold.passes.graph.variants import planned_graph
from meshfold.passes.split.chunk_graph import UncutError
from meshfold.passes.split.micro_chunks import PartsProblem
from meshfold.refine.program_events import with_program_events

TRIED = (2, 4)
LEAST_GAIN = 0.002
"""Of the step; less is not worth graphs of twice the size."""


def with_parts(plan: Plan, folded: FoldedGraph, pinned: int | None) -> Plan:
    """`plan` in mode scheduled with the parts of every region, and with the events and the
    simulated step of its schedule. folded: the captured model. pinned: number of parts to take
    wherever it is possible.

    Raises OptionError where no region can run in as many parts as pinned.
    """
    if pinned is not None and pinned > 1 and plan.schedule:
        raise OptionError(
            f"pin {PARTS}={pinned}: stages of a pipeline do not run in parts; leave one of the two "
            "out"
        )
    costs = CostModel(plan.cluster, plan.mesh)
    probe, known = OpProber(), LineOrders()
    best = with_program_events(plan, folded, costs, probe, known)
    if best.mode != "scheduled" or best.events is None or pinned == 1:
        return best
    problem = PartsProblem(planned_graph(folded, plan), plan)
    if pinned is not None:
        return with_program_events(_pinned(best, problem, pinned), folded, costs, probe, known)
    program = emit(folded, plan, costs=costs, known=known)
    waiting = {r.region for r in program.regions if r.schedule is not None}
    for region in filter(waiting.__contains__, by_time(best)):
        for parts in _possible(best, problem, region):
            tried = _with(best, region, parts)
            found = with_program_events(tried, folded, costs, probe, known)
            # Where two parts do not pay four may: more hides, and weights are read as often again.
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


def _possible(plan: Plan, problem: PartsProblem, region: int) -> Iterator[Parts]:
    """In which parts a region can run: of its samples, where that is possible, else of its
    sequence, which leaves attention whole."""
    found = False
    for of in get_args(PartsOf):
        for count in TRIED if not found else ():
            try:
                problem.in_parts(region, plan.regions[region].typing, Parts(count, of))
            except UncutError:
                break
            found = True
            yield Parts(count, of)


def _with(plan: Plan, region: int, parts: Parts) -> Plan:
    regions = list(plan.regions)
    regions[region] = replace(regions[region], parts=parts)
    return replace(plan, regions=tuple(regions))


def _pinned(plan: Plan, problem: PartsProblem, count: int) -> Plan:
    """Every region in as many parts that can run so."""
    why = ""
    found = plan
    for region in by_time(plan):
        for of in get_args(PartsOf):
            try:
                problem.in_parts(region, plan.regions[region].typing, Parts(count, of))
            except UncutError as error:
                why = why or f"region {plan.regions[region].name}: {error}"
            else:
                found = _with(found, region, Parts(count, of))
                break
    if found is plan:
        raise OptionError(f"pin {PARTS}={count}: no region can run so ({why})")
    return found
