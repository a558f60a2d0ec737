"""A step with microbatches, stages, or both, simulated: one timeline per device.

A stage waits for the collectives of a pass before the next one (meshfold.zero.step), so a pass
depends on nothing that others left on the links. Each kind of pass of each kind of stage is
simulated once, from its events, as a step in one pass is (step.py):

    F first   gathers what stays unsharded (ZeRO 1, 2)          the others do not
              from the start of the step on where its input comes later: all but stage 0; further
              stages of the first device from the end of its first pass on
    B last    reduces what was added up, and what is trailing   the others reduce shards (ZeRO 2, 3)
    W         of a backward what is behind the gradients that it sends: reductions that are waited
              for; under schedules that split the backward gradients of weights and all reductions

and the passes follow each other as the schedule orders them, with transfers between stages
(meshfold.cost_models.pipeline.edge_microbatches). Once per step come, on every device, the sum of
gradients that several devices hold, which starts when all of them are ready, then the sum of the
loss over dp, on the device that makes it, and the update.
The link to the host has no timeline: what passes, and the end of the step, wait for it is given
(HostWaits), as for a step in one pass.
512 microbatches of 64 stages take 0.2 CPU seconds.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshfold.cost_models.memory.put_off_bytes import PutOffBytes
from meshfold.cost_models.pipeline.edge_microbatches import EdgeTimes, edge_ends
from meshfold.cost_models.pipeline.makespan import Seconds, StageTimes
from meshfold.cost_models.pipeline.schedules import Schedule
from meshfold.cost_models.simulation.passes import (
    AheadForward,
    SimulatedPass,
    simulate_ahead,
    simulate_passes,
)
from meshfold.cost_models.simulation.streams import overlap_rows
from meshfold.ir.mesh import DATA_AXIS
from meshfold.ir.step_events import OverlapRow, SimulatedStep, StepEvents

ROUNDING = 1e-12
"""Share of a step that sums of the same seconds in another order may differ by."""


@dataclass(frozen=True)
class HostWaits:
    """Seconds that compute waits for the link to the host: with every forward, with every backward,
    and once per step."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    once_s: float = 0.0


@dataclass(frozen=True)
class StageEvents:
    """What one stage does with a microbatch. Seconds are those of one rank."""

    edge: StepEvents
    """The forward of the first microbatch and the backward of the last."""
    inner: StepEvents
    """All other passes."""
    weight_s: float = 0.0
    """Of the backward's kernels, those that a schedule that splits it leaves to W."""
    tied_s: float = 0.0
    """Once per step: sums of gradients that other devices hold as well."""
    loss_s: float = 0.0
    """Once per step: the sum of the loss over dp."""
    update_s: float = 0.0
    """Once per step: the optimizer."""
    put_off: tuple[PutOffBytes, ...] = ()
    """What each instance leaves of a microbatch for W."""
    host: HostWaits = HostWaits()
    added_s: float = 0.0
    """What a backward adds to gradients of those before, a mean over the microbatches; not of
    weight_s."""


@dataclass(frozen=True)
class StagePasses:
    """The passes of one stage, simulated. first_forward: of one that gathers ahead as it finds the
    gathers done."""

    first_forward: SimulatedPass
    ahead: AheadForward | None
    forward: SimulatedPass
    backward: SimulatedPass
    last_backward: SimulatedPass
    input_gradients_s: float
    """Of either backward, what is not left to W."""


def simulate_stages(stages: Sequence[StageEvents], schedule: Schedule) -> list[StagePasses]:
    """The passes of every stage; equal ones are simulated once."""
    known: dict[tuple[object, ...], tuple[SimulatedPass, SimulatedPass]] = {}
    aheads: dict[tuple[object, ...], AheadForward] = {}

    def key_of(events: StepEvents) -> tuple[object, ...]:
        buckets = events.reduce_buckets, events.allgather_buckets
        return id(events.regions), events.instances, events.trailing, buckets

    def passes(events: StepEvents) -> tuple[SimulatedPass, SimulatedPass]:
        key = key_of(events)
        if key not in known:
            known[key] = simulate_passes(events)
        return known[key]

    def ahead_of(events: StepEvents, *, opens: bool) -> AheadForward:
        key = *key_of(events), opens
        if key not in aheads:
            aheads[key] = simulate_ahead(events, opens=opens)
        return aheads[key]

    found = []
    for number, stage in enumerate(stages):
        first_forward, last_backward = passes(stage.edge)
        ahead = ahead_of(stage.edge, opens=number < schedule.num_devices) if number else None
        forward, backward = passes(stage.inner)
        input_gradients_s = 0.0
        if stage.weight_s:
            _, bare = simulate_passes(_without_reductions(stage.inner))
            input_gradients_s = bare.seconds - min(stage.weight_s, bare.compute_s)
        passes_of = StagePasses(
            ahead.found if ahead else first_forward,
            ahead,
            forward,
            backward,
            last_backward,
            input_gradients_s,
        )
        found.append(_with_host(_with_sums(passes_of, stage.added_s), stage.host))
    return found


def _with_sums(passes: StagePasses, added_s: float) -> StagePasses:
    """Each backward with what it adds to gradients, behind what it sends if it is split."""
    if not added_s:
        return passes
    backward, last = passes.backward, passes.last_backward
    return replace(
        passes,
        backward=replace(backward, compute_s=backward.compute_s + added_s),
        last_backward=replace(last, compute_s=last.compute_s + added_s),
    )


def _with_host(passes: StagePasses, host: HostWaits) -> StagePasses:
    """Each pass with what it waits for the link to the host, before the gradients that a backward
    sends."""
    if host == HostWaits():
        return passes
    ahead = passes.ahead
    forward_s, backward_s = host.forward_s, host.backward_s
    return StagePasses(
        passes.first_forward.waiting(forward_s),
        replace(ahead, at_once_s=ahead.at_once_s + forward_s) if ahead else None,
        passes.forward.waiting(forward_s),
        passes.backward.waiting(backward_s),
        passes.last_backward.waiting(backward_s),
        passes.input_gradients_s + (backward_s if passes.input_gradients_s else 0.0),
    )


def _without_reductions(events: StepEvents) -> StepEvents:
    regions = tuple(
        replace(region, groups=tuple(replace(group, reduce=None) for group in region.groups))
        for region in events.regions
    )
    return replace(events, regions=regions, trailing=(), reduce_buckets=())


def simulate_pipeline(
    schedule: Schedule,
    stages: Sequence[StageEvents],
    hop_s: Seconds,
    *,
    launch_s: float = 0.0,
    peak_bytes: int = 0,
) -> SimulatedStep:
    """The step of the device that ends last. hop_s: from each stage to the next, seconds, shape
    (num_stages - 1,). launch_s: of a device's optimizer. peak_bytes: of the device that needs most,
    which is not simulated; peak_s is 0."""
    passes = simulate_stages(stages, schedule)
    times, edges = _times(passes, hop_s, schedule)
    ends = edge_ends(schedule, times, edges)
    ends_s = ends.ends_s
    numbers = [schedule.stages_of(device) for device in range(schedule.num_devices)]
    tied_s = np.array([sum(stages[s].tied_s for s in own) for own in numbers])
    loss_s = np.array([sum(stages[s].loss_s for s in own) for own in numbers])
    update_s = np.array([launch_s + sum(stages[s].update_s for s in own) for own in numbers])
    holds = tied_s > 0
    ready_s = np.where(holds, ends_s.max(where=holds, initial=0.0), ends_s)
    host_s = np.array([sum(stages[s].host.once_s for s in own) for own in numbers])
    done_s = ready_s + tied_s + loss_s + host_s + update_s
    last = int(np.argmax(done_s))
    own = [passes[s] for s in numbers[last]]
    step = _sum(schedule, own, [float(ends.held_s[s]) for s in numbers[last]])
    compute_s = step.compute_s + float(update_s[last])
    exposed_s = step.exposed_s + float(tied_s[last] + loss_s[last] + host_s[last])
    bubble_s = float(done_s[last]) - compute_s - step.contention_s - exposed_s
    return replace(
        step,
        compute_s=compute_s,
        exposed_s=exposed_s,
        overlap=_with_loss(step.overlap, float(loss_s[last])),
        bubble_s=bubble_s if bubble_s > ROUNDING * done_s[last] else 0.0,
        peak_bytes=peak_bytes,
    )


def _times(
    passes: Sequence[StagePasses], hop_s: Seconds, schedule: Schedule
) -> tuple[StageTimes, EdgeTimes]:
    """Seconds of the passes of every stage; under edges what those at the ends take longer."""
    first, last = [p.first_forward for p in passes], [p.last_backward for p in passes]
    forward, backward = [p.forward for p in passes], [p.backward for p in passes]
    if schedule.num_microbatches == 1:
        forward, backward = first, last
    splits = schedule.splits_backward
    sent = [p.input_gradients_s for p in passes] if splits else [0.0] * len(passes)
    (first_s, forward_s), (last_s, backward_s) = (
        [np.array([p.seconds for p in of]) for of in pair]
        for pair in ((first, forward), (last, backward))
    )
    last_weight_s, weight_s = (
        np.array([p.seconds - s if s else p.tail_s for p, s in zip(of, sent, strict=True)])
        for of in (last, backward)
    )
    times = StageTimes.build(forward_s, backward_s, weight_s=weight_s, hop_s=hop_s)
    more_weight_s = last_weight_s - weight_s
    more_backward_s = last_s - backward_s - more_weight_s
    gathered_s = _gathered_s(passes, schedule)
    return times, EdgeTimes(first_s - forward_s, more_backward_s, more_weight_s, gathered_s)


def _gathered_s(passes: Sequence[StagePasses], schedule: Schedule) -> Seconds:
    """When the first forward of each stage ends if only its gathers hold it up: those of the stages
    of a device follow each other, on device 0 behind its first pass."""
    ends_s = np.zeros(schedule.num_stages)
    for device in range(schedule.num_devices):
        begun_s = 0.0
        for stage in schedule.stages_of(device):
            ahead = passes[stage].ahead
            if ahead is None:
                begun_s = passes[stage].first_forward.seconds
            elif ahead.gathers:
                ends_s[stage] = begun_s + ahead.at_once_s
                begun_s += ahead.gathered_s
    return ends_s


def _sum(
    schedule: Schedule, passes: Sequence[StagePasses], held_s: Sequence[float]
) -> SimulatedStep:
    """What the passes of a device add up to. held_s: per stage the wait for what is gathered
    ahead."""
    inner = schedule.num_microbatches - 1
    aheads = zip(passes, held_s, strict=True)
    counted = [(of.ahead.held(s), 1) for of, s in aheads if of.ahead is not None]
    counted += [
        (p, count)
        for of in passes
        for p, count in (
            (of.first_forward, 1),
            (of.forward, inner),
            (of.backward, inner),
            (of.last_backward, 1),
        )
    ]
    return SimulatedStep(
        compute_s=sum(n * p.compute_s for p, n in counted),
        contention_s=sum(n * p.contention_s for p, n in counted),
        exposed_s=sum(n * p.exposed_s for p, n in counted),
        overlap=_rows(counted),
        peak_bytes=0,
        peak_s=0.0,
    )


def _with_loss(rows: tuple[OverlapRow, ...], loss_s: float) -> tuple[OverlapRow, ...]:
    """With the sum of the loss over dp, if there is one."""
    if not loss_s:
        return rows
    key = "all_reduce", (DATA_AXIS,)
    alike = [row for row in rows if (row.kind, row.axes) == key] or [OverlapRow(*key, 0, 0.0, 0.0)]
    (row,) = alike
    whole = replace(row, count=row.count + 1, exposed_s=row.exposed_s + loss_s)
    return tuple(whole if r is row else r for r in rows) if row in rows else (*rows, whole)


def _rows(counted: Sequence[tuple[SimulatedPass, int]]) -> tuple[OverlapRow, ...]:
    """Their collectives, by kind and axes."""
    sums: dict[tuple[str, tuple[str, ...]], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for one, times in counted:
        for row in overlap_rows(one.transfers) if times else ():
            of = sums[row.kind, row.axes]
            for k, amount in enumerate((row.count, row.hidden_s, row.exposed_s)):
                of[k] += times * amount
    return tuple(
        OverlapRow(*key, int(count), hidden_s, exposed_s)
        for key, (count, hidden_s, exposed_s) in sums.items()
    )
