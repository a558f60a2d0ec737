"""Makespans where the first forward and the last backward of a stage take longer than the others,
and a backward goes on behind the gradients that it sends.

Gathers once per step begin while a stage waits for its first microbatch: its first forward ends no
earlier than if it had found its input at once. Reductions once per step come with its last backward
(meshfold.zero.microbatch_state). What a backward waits for behind its gradients is a W
that follows its B at once, under schedules that do not split the backward, too.

Up to MOST_ACTIONS of a pipeline are run event by event: exact. Of longer ones what the edges add is
taken from the same schedule with fewer microbatches,

    ends(m) + [ends with edges(m') - ends(m')]

where ends(m) is exact (makespan.device_ends_s): behind its warm-up a pipeline repeats, so that m'
of several rounds shows nearly all that edges can do.
Split backwards of several virtual stages have no vector form; beyond MOST_ACTIONS each microbatch
adds what the busiest device takes for one, which is what such schedules are made for.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from meshfold.cost_models.pipeline.actions import Pass, StageAction
from meshfold.cost_models.pipeline.makespan import (
    Seconds,
    StageTimes,
    actions_held_s,
    device_ends_s,
)
from meshfold.cost_models.pipeline.schedules import Schedule

MOST_ACTIONS = 1 << 13
"""Actions that are run one by one: some 40 ms. Longer pipelines are folded."""


@dataclass(frozen=True, eq=False)
class EdgeTimes:
    """Seconds, per stage, that the first forward, the last B and the last W take beyond those of
    StageTimes. gathered_s: when the first forward ends if its input is there from the start of
    the step, from which its parameters are gathered; 0 where it finds them gathered."""

    forward_s: Seconds
    backward_s: Seconds
    weight_s: Seconds
    gathered_s: Seconds

    @property
    def is_none(self) -> bool:
        of_edges = self.forward_s, self.backward_s, self.weight_s, self.gathered_s
        return not any(of.any() for of in of_edges)


@dataclass(frozen=True, eq=False)
class EdgeEnds:
    """ends_s: when each device ends its last pass, shape (num_devices,). held_s: how long the first
    forward of each stage waits for parameters once its input is there, shape (num_stages,)."""

    ends_s: Seconds
    held_s: Seconds


def edge_ends(
    schedule: Schedule, times: StageTimes, edges: EdgeTimes, most_actions: int = MOST_ACTIONS
) -> EdgeEnds:
    """When devices end. times: as for device_ends_s, but weight_s of any schedule is what a
    backward does behind the gradients that it sends."""
    none = np.zeros(schedule.num_stages)
    if schedule.num_stages == 1:
        more_s = edges.forward_s + edges.backward_s + edges.weight_s
        return EdgeEnds(device_ends_s(schedule, times) + more_s, none)
    short = _short(schedule, most_actions)
    has_vectors = schedule.num_virtual_stages == 1 or not schedule.splits_backward
    is_whole = schedule.splits_backward or not times.weight_s.any()
    if edges.is_none and is_whole and has_vectors:
        return EdgeEnds(device_ends_s(schedule, times), none)
    actions = [
        [a for action in device for a in _with_tail(action, short, is_whole=is_whole)]
        for device in short.actions()
    ]
    extra_s = _extra_s(schedule, short, edges)
    between = times.between_devices(schedule)
    firsts = [StageAction(s, Pass.FORWARD, 0) for s in range(schedule.num_stages)]
    no_earlier_s = dict(zip(firsts, edges.gathered_s.tolist(), strict=True))
    short_s, held = actions_held_s(actions, between, extra_s, no_earlier_s)
    held_s = np.array([held[first] for first in firsts])
    if short == schedule:
        return EdgeEnds(short_s, held_s)
    if has_vectors:
        left_out_s = device_ends_s(schedule, times) - device_ends_s(short, times)
        return EdgeEnds(short_s + left_out_s, held_s)
    total_s, own = times.total_s, map(schedule.stages_of, range(schedule.num_devices))
    busiest_s = max(sum(float(total_s[s]) for s in stages) for stages in own)
    left_out = schedule.num_microbatches - short.num_microbatches
    return EdgeEnds(short_s + left_out * busiest_s, held_s)


def _with_tail(action: StageAction, short: Schedule, *, is_whole: bool) -> Iterator[StageAction]:
    """An action, behind a B what it waits for; where is_whole only the last one does."""
    yield action
    is_last = action.microbatch == short.num_microbatches - 1
    if action.kind is Pass.BACKWARD and not short.splits_backward and (is_last or not is_whole):
        yield replace(action, kind=Pass.WEIGHT_GRADIENT)


def _short(schedule: Schedule, most_actions: int) -> Schedule:
    """The schedule with no more microbatches than there are actions for, in whole rounds."""
    p, m = schedule.num_devices, schedule.num_microbatches
    per_microbatch = (3 if schedule.splits_backward else 2) * schedule.num_stages
    rounds = max(1, most_actions // (per_microbatch * p))
    # What is left out is whole rounds as well.
    left_out = max(0, m - rounds * p) // p * p
    return replace(schedule, num_microbatches=m - left_out)


def _extra_s(schedule: Schedule, short: Schedule, edges: EdgeTimes) -> dict[StageAction, float]:
    """What actions take longer than others of their kind."""
    last = short.num_microbatches - 1
    kinds = (
        (edges.forward_s, Pass.FORWARD, 0),
        (edges.backward_s, Pass.BACKWARD, last),
        (edges.weight_s, Pass.WEIGHT_GRADIENT, last),
    )
    return {
        StageAction(stage, kind, microbatch): float(of[stage])
        for of, kind, microbatch in kinds
        for stage in range(schedule.num_stages)
        if of[stage]
    }
