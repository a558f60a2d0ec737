"""The step of a plan in parts, and what it sends over which link."""

from dataclasses import fields

from meshfold.cost_models.simulation.step import simulate
from meshfold.ir.plan import Plan
from meshfold.ir.step_events import StepEvents
from meshfold.report.why_not import LinkUse, StepParts


def parts_of_both(first: Plan, second: Plan) -> tuple[StepParts, StepParts]:
    """Of two plans, like with like: simulated where both are, else as added up."""
    simulated = first.simulated is not None and second.simulated is not None
    return step_parts(first, simulated=simulated), step_parts(second, simulated=simulated)


def step_parts(plan: Plan, *, simulated: bool) -> StepParts:
    """simulated: whether the seconds are those of the simulated step, which the plan then has."""
    events, step, time = plan.events, plan.simulated, plan.time
    links = _by_axis(plan) if events is None else _by_transfer(events)
    recomputed_s = None if events is None else _recomputed_s(events)
    if simulated:
        assert step is not None
        return StepParts(step.step_s, step.parts, links, recomputed_s)
    seconds = [f.name for f in fields(time) if f.name != "communication_s"]
    named = {name.removesuffix("_s").replace("_", " "): getattr(time, name) for name in seconds}
    return StepParts(time.step_s, named, links, recomputed_s)


def _by_transfer(events: StepEvents) -> dict[str, LinkUse]:
    """Every collective of the simulated step, under the slowest link that it crosses."""
    found: dict[str, LinkUse] = {}
    for transfer in simulate(events).transfers:
        event = transfer.collective
        before = found.get(event.link, LinkUse(0.0, 0, 0.0))
        assert before.num_bytes is not None and before.exposed_s is not None
        found[event.link] = LinkUse(
            before.seconds + event.seconds,
            before.num_bytes + event.num_bytes,
            before.exposed_s + transfer.exposed_s,
        )
    return found


def _by_axis(plan: Plan) -> dict[str, LinkUse]:
    """Seconds alone, of the axes that cross a link at the slowest."""
    found: dict[str, LinkUse] = {}
    for axis in plan.mesh.axes:
        seconds = plan.time.communication_s.get(axis.name, 0.0)
        if axis.link and seconds:
            before = found.get(axis.link, LinkUse(0.0))
            found[axis.link] = LinkUse(before.seconds + seconds)
    return found


def _recomputed_s(events: StepEvents) -> float:
    """Compute that the backward runs again."""
    again = [
        sum(event.seconds for event in region.recomputed)
        if any(event.kind == "recompute" for event in region.backward)
        else 0.0
        for region in events.regions
    ]
    return sum(again[region] for region in events.instances)
