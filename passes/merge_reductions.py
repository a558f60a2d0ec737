"""Up to which size reductions of gradients are merged (meshfold.merging): chosen by simulation.

A collective pays its start and its latencies however small it is, and small ones do not reach the
rate of their link; a merged one starts later, so that less compute is left to hide it, and its
buffer is held longer. What is best depends on the whole step, so the step is simulated with sizes
from small to everything, each four times the one before. The fastest that fits is taken; the
smaller one where they are as fast, none where there is nothing to gain.
"""

from collections.abc import Iterator
from dataclasses import replace

from meshfold.cost_models.cost_model import CostModel
from meshfold.cost_models.step_simulation import simulate
from meshfold.merging import Place, Reduction, merged_places
from meshfold.passes.region_events import collective
from meshfold.plan import Plan
from meshfold.step_events import MergedReduction, StepEvents

FACTOR = 4
LEAST_GAIN = 1e-4
"""Of the step; less is nothing."""


def with_merging(plan: Plan, pinned_bytes: int | None, costs: CostModel | None = None) -> Plan:
    """`plan` with the size up to which reductions are merged, and the events and the simulated step
    that it makes. pinned_bytes: the size to take, 0 for none. costs: of the plan's cluster and
    mesh, if at hand."""
    if pinned_bytes is not None:
        return merged_to(plan, pinned_bytes, costs)
    best = plan
    if plan.events is None or plan.simulated is None:
        return best
    costs = costs or CostModel(plan.cluster, plan.mesh)
    tried = {plan.events.merged}
    for size in _sizes(plan.events):
        events = merged_events(plan.events, size, costs)
        if events.merged in tried:
            continue
        tried.add(events.merged)
        step = simulate(events).step
        assert best.simulated is not None
        gains = step.step_s < best.simulated.step_s - LEAST_GAIN * plan.simulated.step_s
        if gains and step.peak_bytes <= max(plan.memory.capacity, plan.simulated.peak_bytes):
            best = replace(plan, merge_bytes=size, events=events, simulated=step)
    return best


def merged_to(plan: Plan, most_bytes: int, costs: CostModel | None = None) -> Plan:
    """`plan` with reductions merged up to this size."""
    made = replace(plan, merge_bytes=most_bytes)
    if plan.events is None or most_bytes == plan.merge_bytes == 0:
        return made
    costs = costs or CostModel(plan.cluster, plan.mesh)
    events = merged_events(plan.events, most_bytes, costs)
    return replace(made, events=events, simulated=simulate(events).step)


def merged_events(events: StepEvents, most_bytes: int, costs: CostModel) -> StepEvents:
    """The same step with reductions merged up to this size."""
    places = merged_places(reductions_of(events), most_bytes)
    return replace(events, merged=tuple(_priced(events, group, costs) for group in places))


def reductions_of(events: StepEvents) -> Iterator[Reduction]:
    """Those of buckets, in the order of the backward."""
    for k in reversed(range(len(events.instances))):
        for number, bucket in enumerate(events.regions[events.instances[k]].buckets):
            if bucket.reduce is not None and bucket.dtype:
                key = bucket.reduce.kind, bucket.reduce.axes, bucket.dtype
                yield Reduction((k, number), key, bucket.reduce.num_bytes)


def _priced(events: StepEvents, places: tuple[Place, ...], costs: CostModel) -> MergedReduction:
    members = [
        reduce
        for k, number in places
        if (reduce := events.regions[events.instances[k]].buckets[number].reduce) is not None
    ]
    axes = [costs.mesh.index(name) for name in members[0].axes]
    num_bytes = sum(member.num_bytes for member in members)
    return MergedReduction(places, collective(members[0].kind, num_bytes, axes, costs))


def _sizes(events: StepEvents) -> Iterator[int]:
    """From two of the smallest reductions to all."""
    found = list(reductions_of(events))
    if not found:
        return
    size, everything = 2 * min(r.num_bytes for r in found), sum(r.num_bytes for r in found)
    while size < everything:
        yield size
        size *= FACTOR
    yield everything
