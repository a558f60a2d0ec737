"""Sizes of buckets of reductions and gathers (meshfold.ir.bucketing), and of the pieces of
hierarchical all-reduces (meshfold.ir.node_groups), chosen by simulation.

A collective pays its start and its latencies however small it is, and small ones do not reach the
rate of their link. The reduction of a bucket starts later, so less compute is left to hide it, and
its buffer is allocated longer; the gather of a bucket unshards more layers at once. So the step is
simulated with sizes from small to everything, each four times the one before, as long as that saves
links some of their time: reductions first, then gathers. The fastest that fits is taken; the
smaller one where they are as fast, none where nothing is gained. Then hierarchical all-reduces are
tried in pieces of several sizes (passes/events/hierarchical.py), unless the step gained nothing if
all-reduces took no time, and with the best of them the buckets once more.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.cost_models.simulation.step import simulate
from meshfold.errors import OptionError
from meshfold.ir.bucketing import BucketMember, GroupRef, fill_buckets
from meshfold.ir.options import HIERARCHICAL_ALL_REDUCE
from meshfold.ir.plan import Plan
from meshfold.ir.step_events import (
    AllGatherBucket,
    CollectiveEvent,
    ParameterGroupEvents,
    ReduceBucket,
    StepEvents,
)
from meshfold.passes.events.hierarchical import (
    hierarchical_events,
    hierarchical_on,
    piece_sizes,
    without_all_reduces,
)
from meshfold.passes.events.region import collective, summed_over

FACTOR = 4
LEAST_GAIN = 1e-4
"""Share of the step; less is no gain."""
PAYS = 0.005
"""Share of the seconds of all that can be coalesced: a size that saves less than this over the one
before is not simulated."""
CLEARLY, ENOUGH = 0.01, 2
"""After so many sizes in a row with which the step is slower than the best by this share of it,
larger ones are not tried."""


@dataclass(frozen=True, slots=True)
class BucketSizes:
    """Bytes of buckets of reductions and of gathers, and of the pieces of hierarchical all-reduces
    (0: none). None of a pin: the search chooses."""

    reductions: int | None = None
    gathers: int | None = None
    hierarchical: int | None = None


def with_buckets(plan: Plan, pinned: BucketSizes) -> Plan:
    """`plan` with the sizes of its buckets, and the events and the simulated step of these.

    Raises OptionError where hierarchical all-reduces are pinned on groups that have no levels.
    """
    costs = CostModel(plan.cluster, plan.mesh)
    if pinned.hierarchical and not hierarchical_on(costs, 1).has_levels:
        raise OptionError(
            f"pin {HIERARCHICAL_ALL_REDUCE}: the ranks of {plan.mesh} do not lie on several nodes "
            f"of {plan.cluster.name}, several on each and alike; leave it out"
        )
    best = _bucketed(plan, replace(pinned, hierarchical=pinned.hierarchical or 0), costs)
    if pinned.hierarchical is not None or best.events is None:
        return best
    # The steps of many reductions fill both links, so less may have to be coalesced.
    sizes = sorted({best.reduce_bucket_bytes, pinned.reductions or 0})
    pieces = list(piece_sizes(best.events, costs))
    if not pieces:
        return best
    # Pieces change all-reduces alone, and no piece of work makes a step shorter (streams.py).
    least_s = simulate(without_all_reduces(best.events)).step.step_s
    if least_s > (1 - LEAST_GAIN) * _step_s(best):
        return best

    def in_pieces(chosen: Iterable[int]) -> list[Plan]:
        found = BucketSizes(gathers=best.allgather_bucket_bytes)
        each = [replace(found, reductions=r, hierarchical=h) for h in chosen for r in sizes]
        return [with_bucket_sizes(best, one, costs) for one in each]

    # Every other size first, then the two beside the best of these.
    tried = in_pieces(pieces[::2])
    at = pieces.index(min(tried, key=_step_s).hierarchical_all_reduce_bytes)
    tried += in_pieces(pieces[k] for k in (at - 1, at + 1) if 0 <= k < len(pieces))
    hierarchical = min(tried, key=_step_s).hierarchical_all_reduce_bytes
    rebucketed = _bucketed(plan, replace(pinned, hierarchical=hierarchical), costs)
    return _fastest_of([best, *tried, rebucketed])


def _fastest_of(plans: Sequence[Plan]) -> Plan:
    """The first, or what is clearly faster and fits; where the first does not fit, what does."""
    best = plans[0]
    for plan in plans[1:]:
        gains = _step_s(plan) < _step_s(best) * (1 - LEAST_GAIN)
        if plan.memory.fits and (gains or not best.memory.fits):
            best = plan
    return best


def _step_s(plan: Plan) -> float:
    assert plan.simulated is not None
    return plan.simulated.step_s


def _bucketed(plan: Plan, pinned: BucketSizes, costs: CostModel) -> Plan:
    """The same as with_buckets, with `hierarchical` given."""
    start = replace(pinned, reductions=pinned.reductions or 0, gathers=pinned.gathers or 0)
    best = with_bucket_sizes(plan, start, costs)
    if best.events is None:
        return best
    if pinned.reductions is None:
        found = list(reductions_of(best.events))
        sizes = [replace(start, reductions=size) for size in _sizes(found)]
        own_s = sum(_own_s(best.events, one.group) for one in found)
        best = _fastest(best, own_s, sizes, costs)
    if pinned.gathers is None and best.events is not None:
        start = replace(start, reductions=best.reduce_bucket_bytes)
        found = list(gathers_of(best.events))
        sizes = [replace(start, gathers=size) for size in _sizes(found)]
        own_s = sum(_own_s(best.events, one.group, gathers=True) for one in found)
        best = _fastest(best, own_s, sizes, costs)
    return best


def _fastest(plan: Plan, own_s: float, sizes: Sequence[BucketSizes], costs: CostModel) -> Plan:
    """The first of the fastest that fit, the plan as it is before all. own_s: seconds of what is to
    be coalesced, one by one."""
    assert plan.events is not None and plan.simulated is not None
    best, least_s = plan, plan.simulated.step_s
    tried = {(plan.events.reduce_buckets, plan.events.allgather_buckets)}
    least_saved_s = PAYS * own_s
    saved_s = _saved_s(plan.events)
    worse = 0
    for size in sizes:
        events = bucketed_events(plan.events, size, costs)
        if (events.reduce_buckets, events.allgather_buckets) in tried:
            continue
        tried.add((events.reduce_buckets, events.allgather_buckets))
        if _saved_s(events) - saved_s < least_saved_s:
            continue
        saved_s = _saved_s(events)
        found = _with(plan, size, events)
        step_s = _step_s(found)
        gains = step_s < least_s - LEAST_GAIN * plan.simulated.step_s
        if found.memory.fits and (gains or not best.memory.fits):
            best, least_s = found, step_s
        worse = worse + 1 if step_s > (1 + CLEARLY) * least_s else 0
        if worse == ENOUGH:
            break
    return best


def with_bucket_sizes(plan: Plan, sizes: BucketSizes, costs: CostModel | None = None) -> Plan:
    """`plan` with buckets of these sizes."""
    if plan.events is None:
        return _with(plan, sizes, None)
    costs = costs or CostModel(plan.cluster, plan.mesh)
    events = bucketed_events(plan.events, sizes, costs)
    if events == plan.events and sizes == sizes_of(plan):
        return plan
    return _with(plan, sizes, events)


def _with(plan: Plan, sizes: BucketSizes, events: StepEvents | None) -> Plan:
    found = replace(
        plan,
        reduce_bucket_bytes=sizes.reductions or 0,
        allgather_bucket_bytes=sizes.gathers or 0,
        hierarchical_all_reduce_bytes=sizes.hierarchical or 0,
    )
    return found if events is None else with_events(found, events)


def with_events(plan: Plan, events: StepEvents) -> Plan:
    """`plan` with these events, and the simulated step and the peak memory of them."""
    step = simulate(events).step
    memory = plan.memory.of_program(step.peak_bytes)
    return replace(plan, events=events, simulated=step, memory=memory)


def sizes_of(plan: Plan) -> BucketSizes:
    """The sizes of the buckets of a plan."""
    return BucketSizes(
        plan.reduce_bucket_bytes, plan.allgather_bucket_bytes, plan.hierarchical_all_reduce_bytes
    )


def bucketed_events(
    events: StepEvents, sizes: BucketSizes, costs: CostModel, *, keeps_last: bool = True
) -> StepEvents:
    """The same step with buckets of these sizes. keeps_last: whether the last region stays
    unsharded for its backward."""
    reductions = []
    for groups in fill_buckets(reductions_of(events), sizes.reductions or 0):
        of = _priced((_group(events, group).reduce for group in groups), costs)
        assert of is not None
        reductions.append(ReduceBucket(groups, of))
    last = max((k for k, r in enumerate(events.instances) if events.regions[r].unshards), default=0)
    gathers = []
    for groups in fill_buckets(gathers_of(events), sizes.gathers or 0):
        of = _priced((_group(events, group).gather for group in groups), costs)
        assert of is not None
        saved = [g for g in groups if _group(events, g).saved and not (keeps_last and g[0] == last)]
        regather = _priced((_group(events, group).gather for group in saved), costs)
        gathers.append(AllGatherBucket(groups, of, regather))
    events = replace(events, reduce_buckets=tuple(reductions), allgather_buckets=tuple(gathers))
    return hierarchical_events(events, sizes.hierarchical or 0, costs)


def _own_s(events: StepEvents, group: GroupRef, *, gathers: bool = False) -> float:
    """Seconds of a collective that is not coalesced."""
    found = _group(events, group)
    of = found.gather if gathers else found.reduce
    return 0.0 if of is None else of.seconds


def _saved_s(events: StepEvents) -> float:
    """Seconds of links that buckets save; of gathers in the forward."""
    saved_s = 0.0
    for buckets, gathers in ((events.reduce_buckets, False), (events.allgather_buckets, True)):
        for bucket in buckets:
            own_s = sum(_own_s(events, group, gathers=gathers) for group in bucket.groups)
            saved_s += own_s - bucket.collective.seconds
    return saved_s


def _group(events: StepEvents, group: GroupRef) -> ParameterGroupEvents:
    instance, number = group
    return events.regions[events.instances[instance]].groups[number]


def reductions_of(events: StepEvents) -> Iterator[BucketMember]:
    """Reductions that can be coalesced, in the order of the backward."""
    for k in reversed(range(len(events.instances))):
        for number, group in enumerate(events.regions[events.instances[k]].groups):
            if group.reduce is not None and group.dtype and not group.is_unbucketed:
                key = group.reduce.kind, group.reduce.axes, group.dtype
                yield BucketMember((k, number), key, group.reduce.num_bytes)


def gathers_of(events: StepEvents) -> Iterator[BucketMember]:
    """Gathers that can be coalesced, in the order of the forward."""
    for k, r in enumerate(events.instances):
        region = events.regions[r]
        for number, group in enumerate(region.groups):
            if group.gather is not None and group.read_dtype and not group.is_unbucketed:
                key = group.gather.axes, group.read_dtype, region.reshard_after_forward
                yield BucketMember((k, number), key, group.gather.num_bytes)


def _priced(members: Iterable[CollectiveEvent | None], costs: CostModel) -> CollectiveEvent | None:
    """One collective for all; None for none."""
    found = [member for member in members if member is not None]
    if not found:
        return None
    of = costs.storage

    def together(like: CollectiveEvent, num_bytes: int) -> CollectiveEvent:
        return collective(like.kind, num_bytes, [of.mesh.index(name) for name in like.axes], of)

    total = together(found[0], sum(member.num_bytes for member in found))
    if found[0].kind != "reduce_scatter" or not found[0].steps:
        return total
    scattering, summing = found[0].steps
    return summed_over(
        total,
        [of.mesh.index(name) for name in summing.axes],
        scattering.num_bytes // summing.num_bytes,
        of,
    )


def _sizes(found: Sequence[BucketMember]) -> Iterator[int]:
    """Sizes to try, from two of the smallest to all."""
    if not found:
        return
    size, everything = 2 * min(r.num_bytes for r in found), sum(r.num_bytes for r in found)
    while size < everything:
        yield size
        size *= FACTOR
    yield everything
