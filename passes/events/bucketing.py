"""Up to which size reductions of gradients, and gathers of parameters, are merged
(meshfold.ir.bucketing), and in pieces of which all-reduces run in phases (meshfold.ir.node_groups): chosen by
simulation.

A collective pays its start and its latencies however small it is, and small ones do not reach the
rate of their link. A merged reduction starts later, so that less compute is left to hide it, and
its buffer is held longer; a merged gather makes more layers whole at once. What is best depends on
the whole step, so the step is simulated with sizes from small to everything, each four times the
one before, as long as that saves links some of their time: reductions first, then gathers beside
them. The fastest that fits is taken; the smaller one where they are as fast, none where there is
nothing to gain. Then all-reduces are tried in phases, in pieces of several sizes
(passes/phased_events.py), and with the best of them again what is merged.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.cost_models.simulation.step import simulate
from meshfold.errors import OptionError
from meshfold.ir.bucketing import Mergeable, Place, merged_places
from meshfold.ir.options import HIERARCHY
from meshfold.ir.plan import Plan
from meshfold.ir.step_events import (
    BucketEvents,
    Collective,
    MergedGather,
    MergedReduction,
    StepEvents,
)
from meshfold.passes.events.hierarchical import hierarchy_of, phased_events, piece_sizes
from meshfold.passes.events.region import collective

FACTOR = 4
LEAST_GAIN = 1e-4
"""Of the step; less is nothing."""
PAYS = 0.005
"""Of the seconds of all that can be merged: a size that saves less of them than the one before is
where merging stops paying, and is not simulated."""
CLEARLY, ENOUGH = 0.01, 2
"""Sizes in a row with which the step is slower than the best by this share of it: larger ones, with
less and less to hide behind, are not tried."""


@dataclass(frozen=True, slots=True)
class MergeSizes:
    """Bytes up to which reductions and gathers are merged, and of the pieces in which all-reduces
    run in phases (0: none do). Of pins: None where the search is to choose."""

    reductions: int | None = None
    gathers: int | None = None
    phased: int | None = None


def with_merging(plan: Plan, pinned: MergeSizes, costs: CostModel | None = None) -> Plan:
    """`plan` with the sizes of MergeSizes, and the events and the simulated step that they make.
    costs: of the plan's cluster and mesh, if at hand.

    Raises OptionError where phases are pinned on groups that have no levels.
    """
    costs = costs or CostModel(plan.cluster, plan.mesh)
    if pinned.phased and not hierarchy_of(costs, 1).has_levels:
        raise OptionError(_no_levels(plan))
    best = _merged(plan, replace(pinned, phased=pinned.phased or 0), costs)
    if pinned.phased is not None or best.events is None:
        return best
    # Phases fill both links where reductions are many, so less may have to be merged, too.
    merges = {best.merge_bytes, pinned.reductions or 0}
    tried = [
        merged_to(best, MergeSizes(most, best.merge_gather_bytes, size), costs)
        for size in piece_sizes(best.events, costs)
        for most in sorted(merges)
    ]
    if not tried:
        return best
    phased = min(tried, key=_step_s).hierarchy_bytes
    again = _merged(plan, replace(pinned, phased=phased), costs)
    return _fastest_of([best, *tried, again])


def _fastest_of(plans: Sequence[Plan]) -> Plan:
    """The first, or what is clearly faster and fits."""
    assert plans[0].simulated is not None
    most_bytes = max(plans[0].memory.capacity, plans[0].simulated.peak_bytes)
    best = plans[0]
    for plan in plans[1:]:
        assert plan.simulated is not None
        gains = _step_s(plan) < _step_s(best) * (1 - LEAST_GAIN)
        if gains and plan.simulated.peak_bytes <= most_bytes:
            best = plan
    return best


def _step_s(plan: Plan) -> float:
    assert plan.simulated is not None
    return plan.simulated.step_s


def _no_levels(plan: Plan) -> str:
    return (
        f"pin {HIERARCHY}: the ranks of {plan.mesh} do not lie on several nodes of "
        f"{plan.cluster.name}, several on each and alike; leave it out"
    )


def _merged(plan: Plan, pinned: MergeSizes, costs: CostModel) -> Plan:
    """As with_merging, with `phased` given."""
    start = replace(pinned, reductions=pinned.reductions or 0, gathers=pinned.gathers or 0)
    best = merged_to(plan, start, costs)
    if best.events is None:
        return best
    if pinned.reductions is None:
        found = list(reductions_of(best.events))
        sizes = [replace(start, reductions=size) for size in _sizes(found)]
        own_s = sum(_own_s(best.events, one.place) for one in found)
        best = _fastest(best, own_s, sizes, costs)
    if pinned.gathers is None and best.events is not None:
        start = replace(start, reductions=best.merge_bytes)
        found = list(gathers_of(best.events))
        sizes = [replace(start, gathers=size) for size in _sizes(found)]
        own_s = sum(_own_s(best.events, one.place, gathers=True) for one in found)
        best = _fastest(best, own_s, sizes, costs)
    return best


def _fastest(plan: Plan, own_s: float, sizes: Sequence[MergeSizes], costs: CostModel) -> Plan:
    """The first of the fastest that fit, the plan as it is before all. own_s: seconds of what is to
    be merged, one by one."""
    assert plan.events is not None and plan.simulated is not None
    best, least_s = plan, plan.simulated.step_s
    most_bytes = max(plan.memory.capacity, plan.simulated.peak_bytes)
    tried = {(plan.events.merged, plan.events.gathers)}
    least_saved_s = PAYS * own_s
    saved_s = _saved_s(plan.events)
    worse = 0
    for size in sizes:
        events = merged_events(plan.events, size, costs)
        if (events.merged, events.gathers) in tried:
            continue
        tried.add((events.merged, events.gathers))
        if _saved_s(events) - saved_s < least_saved_s:
            continue
        saved_s = _saved_s(events)
        step = simulate(events).step
        gains = step.step_s < least_s - LEAST_GAIN * plan.simulated.step_s
        if gains and step.peak_bytes <= most_bytes:
            best, least_s = _with(plan, size, events), step.step_s
        worse = worse + 1 if step.step_s > (1 + CLEARLY) * least_s else 0
        if worse == ENOUGH:
            break
    return best


def merged_to(plan: Plan, sizes: MergeSizes, costs: CostModel | None = None) -> Plan:
    """`plan` with collectives merged up to these sizes."""
    if plan.events is None:
        return _with(plan, sizes, None)
    costs = costs or CostModel(plan.cluster, plan.mesh)
    events = merged_events(plan.events, sizes, costs)
    if events == plan.events and sizes == sizes_of(plan):
        return plan
    return _with(plan, sizes, events)


def _with(plan: Plan, sizes: MergeSizes, events: StepEvents | None) -> Plan:
    return replace(
        plan,
        merge_bytes=sizes.reductions or 0,
        merge_gather_bytes=sizes.gathers or 0,
        hierarchy_bytes=sizes.phased or 0,
        events=events,
        simulated=plan.simulated if events is None else simulate(events).step,
    )


def sizes_of(plan: Plan) -> MergeSizes:
    """Those of a plan."""
    return MergeSizes(plan.merge_bytes, plan.merge_gather_bytes, plan.hierarchy_bytes)


def merged_events(events: StepEvents, sizes: MergeSizes, costs: CostModel) -> StepEvents:
    """The same step with collectives merged up to these sizes, and in phases, in pieces of that."""
    reduced = merged_places(reductions_of(events), sizes.reductions or 0)
    gathered = merged_places(gathers_of(events), sizes.gathers or 0)
    makes = [k for k, r in enumerate(events.instances) if events.regions[r].makes]
    merged = []
    for places in reduced:
        of = _priced((_bucket(events, p).reduce for p in places), costs)
        assert of is not None
        merged.append(MergedReduction(places, of))
    gathers = []
    for places in gathered:
        of = _priced((_bucket(events, p).gather for p in places), costs)
        assert of is not None
        # The last region stays whole for its backward.
        saved = [p for p in places if _bucket(events, p).saved and p[0] != makes[-1]]
        again = _priced((_bucket(events, p).gather for p in saved), costs)
        gathers.append(MergedGather(places, of, again))
    events = replace(events, merged=tuple(merged), gathers=tuple(gathers))
    return phased_events(events, sizes.phased or 0, costs)


def _own_s(events: StepEvents, place: Place, *, gathers: bool = False) -> float:
    """Seconds of one that is not merged."""
    bucket = _bucket(events, place)
    of = bucket.gather if gathers else bucket.reduce
    return 0.0 if of is None else of.seconds


def _saved_s(events: StepEvents) -> float:
    """Seconds of links that merging saves; of gathers in the forward."""
    reduced = sum(
        sum(_own_s(events, place) for place in one.places) - one.collective.seconds
        for one in events.merged
    )
    return reduced + sum(
        sum(_own_s(events, place, gathers=True) for place in one.places) - one.collective.seconds
        for one in events.gathers
    )


def _bucket(events: StepEvents, place: Place) -> BucketEvents:
    instance, number = place
    return events.regions[events.instances[instance]].buckets[number]


def reductions_of(events: StepEvents) -> Iterator[Mergeable]:
    """Those of buckets, in the order of the backward."""
    for k in reversed(range(len(events.instances))):
        for number, bucket in enumerate(events.regions[events.instances[k]].buckets):
            if bucket.reduce is not None and bucket.dtype and not bucket.is_alone:
                key = bucket.reduce.kind, bucket.reduce.axes, bucket.dtype
                yield Mergeable((k, number), key, bucket.reduce.num_bytes)


def gathers_of(events: StepEvents) -> Iterator[Mergeable]:
    """Those of buckets, in the order of the forward."""
    for k, r in enumerate(events.instances):
        region = events.regions[r]
        for number, bucket in enumerate(region.buckets):
            if bucket.gather is not None and bucket.read_dtype and not bucket.is_alone:
                key = bucket.gather.axes, bucket.read_dtype, region.stays
                yield Mergeable((k, number), key, bucket.gather.num_bytes)


def _priced(members: Iterable[Collective | None], costs: CostModel) -> Collective | None:
    """All in one; None for none."""
    found = [member for member in members if member is not None]
    if not found:
        return None
    axes = [costs.mesh.index(name) for name in found[0].axes]
    return collective(found[0].kind, sum(member.num_bytes for member in found), axes, costs)


def _sizes(found: Sequence[Mergeable]) -> Iterator[int]:
    """From two of the smallest to all."""
    if not found:
        return
    size, everything = 2 * min(r.num_bytes for r in found), sum(r.num_bytes for r in found)
    while size < everything:
        yield size
        size *= FACTOR
    yield everything
