"""In what precision a plan keeps optimizer states, where the user leaves that to the search.

States in bfloat16 or in 8 bits take less memory and a longer step (cost_models/op_costs/
optimizers.py), and train other numbers: nothing takes them that was not allowed to. A plan is
searched per precision, and the fastest that fits wins; of equal ones that of more bits.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from meshfold.errors import InfeasibleError
from meshfold.ir.optimizers import OF_STATES, STATES
from meshfold.ir.plan import Plan
from meshfold.passes.planner.assembly import PlanRequest

PlansOf = Callable[[PlanRequest], tuple[Plan, ...]]
"""The fastest plan of a request first, then others that may win once they are emitted."""


def fastest_states(request: PlanRequest, plans_of: PlansOf) -> tuple[Plan, ...]:
    """The plans of the precision, of those that the request leaves open, whose best is fastest.
    Raises what plans_of raises for the one that needs least where none fits."""
    best: tuple[Plan, ...] = ()
    errors: list[InfeasibleError] = []
    for asked in requests(request):
        try:
            plans = plans_of(asked)
        except InfeasibleError as error:
            errors.append(error)
            continue
        if not best or plans[0].step_s < best[0].step_s:
            best = plans
    if not best:
        raise min(errors, key=lambda error: error.required_bytes)
    return best


def requests(request: PlanRequest) -> Iterator[PlanRequest]:
    """The request, and those for the same optimizer with states of fewer bits."""
    yield request
    options = request.options
    is_open = options.allow_low_precision_states and STATES not in options.pins
    if is_open and options.optimizer in OF_STATES["full"]:
        for precision in ("bf16", "int8"):
            optimizer = OF_STATES[precision][0]
            yield replace(request, options=replace(options, optimizer=optimizer))
