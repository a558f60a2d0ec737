"""The fastest program that fits its memory budget as it is emitted.

The search counts memory region by region. The program that runs may have more: pinned buckets, an
order of mode scheduled, what is gathered ahead. Where no finalist fits as emitted, in no mode, that
is taken off the budget of another search, until one does.
"""

from dataclasses import replace

from meshfold.errors import InfeasibleError
from meshfold.ir.plan import Plan, SearchStats
from meshfold.passes.planner.assembly import PlanRequest
from meshfold.passes.planner.best_mesh import Progress
from meshfold.passes.planner.find import find_finalists
from meshfold.passes.planner.offload import within
from meshfold.passes.split.as_planned import as_planned
from meshfold.refine.finalists import Winner, fastest
from meshfold.units import bytes_text

MOST_SEARCHES = 8
"""In budgets one below the other."""


def fastest_that_fits(request: PlanRequest, progress: Progress | None = None) -> Winner:
    """The fastest of the finalists, refined. Its bound is that of the first search, which counts
    every program that fits as emitted among its own.

    Raises OptionError where a pin cannot be kept, InfeasibleError where nothing fits.
    """
    finalists = find_finalists(request, progress)
    first, won = finalists[0], _refined(finalists, request)
    ahead = won.plan
    if ahead.memory.fits:
        return won
    budget = high = first.memory.capacity
    low, tightest = 0, ahead
    for _ in range(MOST_SEARCHES):
        # What is left beside what is emitted, or half way to where nothing is found.
        asked = min(high - 1, budget - won.plan.memory.emitted)
        asked = asked if asked > low else (low + high) // 2
        try:
            finalists = find_finalists(within(request, asked), progress)
        except InfeasibleError:
            low = asked
            continue
        won, high = _refined([_in_budget(plan, budget) for plan in finalists], request), asked
        if won.plan.memory.fits:
            return _noted(won, ahead, first.search)
        tightest = min(tightest, won.plan, key=lambda plan: plan.memory.peak)
    raise _refusal(tightest)


def _refined(finalists: tuple[Plan, ...] | list[Plan], request: PlanRequest) -> Winner:
    return fastest(finalists, as_planned(request.folded, finalists[0]), request.options)


def _in_budget(plan: Plan, num_bytes: int) -> Plan:
    """A plan that was searched in a smaller budget, in one of `num_bytes`."""
    stages = []
    for stage in plan.stages:
        costs = stage.costs
        if costs is not None and costs.memory is not None:
            costs = replace(costs, memory=replace(costs.memory, capacity=num_bytes))
        stages.append(replace(stage, costs=costs))
    return replace(plan, memory=replace(plan.memory, capacity=num_bytes), stages=tuple(stages))


def _noted(won: Winner, ahead: Plan, search: SearchStats) -> Winner:
    """What fits at last. ahead: what does not fit as emitted; search: that of the whole budget."""
    memory = ahead.memory
    note = (
        f"{ahead.strategy.label} was ahead as the search counts memory; emitted it needs "
        f"{bytes_text(memory.peak)}, {bytes_text(memory.peak - memory.capacity)} too much"
    )
    plan = replace(won.plan, search=search, notes=(*won.plan.notes, note))
    return replace(won, plan=plan)


def _refusal(plan: Plan) -> InfeasibleError:
    memory = plan.memory
    label, over = plan.strategy.label, memory.peak - memory.capacity
    return InfeasibleError(
        f"no program fits in {bytes_text(memory.capacity)}: the smallest found, {label}, needs "
        f"{bytes_text(memory.peak)} as it is emitted, {bytes_text(over)} too much; state a larger "
        "budget or leave out pins of buckets, modes and micro-chunks",
        binding_constraint="memory",
        best_candidate=label,
        required_bytes=memory.peak,
        available_bytes=memory.capacity,
    )
