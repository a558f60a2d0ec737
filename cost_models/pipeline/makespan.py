"""Step time of a pipeline schedule, exact.

Notation as in meshfold.cost_models.pipeline.schedules; the makespan ends with the last pass, every
pass after its inputs and its device's pass before it.

`simulate_actions` runs any order of actions event by event; `device_ends_s` gives the same numbers
for the schedules of meshfold.cost_models.pipeline.schedules by vectors over devices
(vector_makespan.py). Transfers overlap compute and do not queue behind each other. Seconds
throughout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshfold.cost_models.pipeline.actions import Pass, StageAction
from meshfold.cost_models.pipeline.schedules import Schedule, ScheduleKind
from meshfold.cost_models.pipeline.vector_makespan import interleaved_ends_s, one_f_one_b_ends_s

Seconds = NDArray[np.float64]

NONE: Mapping[StageAction, float] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class StageTimes:
    """Seconds per microbatch of each stage (with virtual stages: stage s on device s mod p).

    backward_s: all of the backward; weight_s: what of it only computes weight gradients;
    hop_s: from stage s to s+1 and the same back, one entry less than stages.
    """

    forward_s: Seconds
    backward_s: Seconds
    weight_s: Seconds
    hop_s: Seconds

    @classmethod
    def build(
        cls,
        forward_s: ArrayLike,
        backward_s: ArrayLike,
        *,
        weight_s: ArrayLike = 0.0,
        hop_s: ArrayLike = 0.0,
    ) -> "StageTimes":
        """Scalars count for every stage. Raises ValueError for negative times or shapes that do
        not fit, and where a weight gradient is longer than its backward."""
        forward = np.atleast_1d(np.asarray(forward_s, float))
        n = len(forward)
        backward, weight, hop = (
            np.broadcast_to(np.asarray(value, float), (size,))
            for value, size in ((backward_s, n), (weight_s, n), (hop_s, n - 1))
        )
        if min(float(a.min(initial=0.0)) for a in (forward, backward, weight, hop)) < 0:
            raise ValueError("times of stages must not be negative")
        if (weight > backward).any():
            raise ValueError(
                "the weight gradient takes longer than the backward, which includes it"
            )
        return cls(forward, backward, weight, hop)

    @property
    def total_s(self) -> Seconds:
        """Forward and backward of one microbatch, per stage."""
        return self.forward_s + self.backward_s

    def for_schedule(self, schedule: Schedule) -> "StageTimes":
        """The same times with backward_s what the schedule calls B: less W where it splits it.

        Raises ValueError when the number of stages differs.
        """
        if len(self.forward_s) != schedule.num_stages:
            raise ValueError(
                f"{len(self.forward_s)} stages have times, {schedule} has {schedule.num_stages}"
            )
        if not schedule.splits_backward:
            none = np.zeros_like(self.weight_s)
            return StageTimes(self.forward_s, self.backward_s, none, self.hop_s)
        return StageTimes(
            self.forward_s, self.backward_s - self.weight_s, self.weight_s, self.hop_s
        )

    def between_devices(self, schedule: Schedule) -> "StageTimes":
        """The same times where a transfer within a device takes no time: where the
        way of a V turns."""
        hop = np.where(
            [schedule.crosses_devices(s) for s in range(1, schedule.num_stages)], self.hop_s, 0
        )
        return StageTimes(self.forward_s, self.backward_s, self.weight_s, hop)


def device_ends_s(schedule: Schedule, times: StageTimes) -> Seconds:
    """When each device ends its last pass, shape (num_devices,)."""
    own = times.for_schedule(schedule)
    f, b, hop = own.forward_s, own.backward_s, own.hop_s
    if schedule.num_virtual_stages > 1 and schedule.splits_backward:
        return simulate_actions(schedule.actions(), times.between_devices(schedule))
    if schedule.kind is ScheduleKind.GPIPE:
        return _gpipe_ends_s(schedule.num_microbatches, f, b, hop)
    if schedule.num_virtual_stages > 1:
        return interleaved_ends_s(schedule, f, b, hop)
    return one_f_one_b_ends_s(schedule, f, b, own.weight_s, hop)


def _gpipe_ends_s(num_microbatches: int, f: Seconds, b: Seconds, hop: Seconds) -> Seconds:
    """Equal jobs through a flow shop end at sum + (m-1) max of the times on their way: forwards
    down, then backwards up."""
    later = num_microbatches - 1
    forwards_s = float(f.sum() + hop.sum() + later * f.max())
    way_up: Seconds = (b + np.append(hop, 0.0))[::-1].cumsum()[::-1]
    slowest_up: Seconds = np.maximum.accumulate(b[::-1])[::-1]
    return forwards_s + way_up + later * slowest_up


def simulate_actions(
    actions: Sequence[Sequence[StageAction]],
    times: StageTimes,
    extra_s: Mapping[StageAction, float] = NONE,
    no_earlier_s: Mapping[StageAction, float] = NONE,
) -> Seconds:
    """When each device ends, given the actions of each in order (any order, any number of virtual
    stages). extra_s: what single actions take longer than others of their kind and stage;
    no_earlier_s: before when they cannot end.

    A W in the actions of a stage makes its B the input gradient. Raises ValueError for a deadlock,
    naming the action each stuck device waits with.
    """
    return actions_held_s(actions, times, extra_s, no_earlier_s)[0]


def actions_held_s(
    actions: Sequence[Sequence[StageAction]],
    times: StageTimes,
    extra_s: Mapping[StageAction, float] = NONE,
    no_earlier_s: Mapping[StageAction, float] = NONE,
) -> tuple[Seconds, dict[StageAction, float]]:
    """What simulate_actions gives, and how much later each action of no_earlier_s ends for that."""
    timeline = _Timeline(actions, times, extra_s, no_earlier_s)
    ends_s = np.array([timeline.end_s(device[-1]) if device else 0.0 for device in actions])
    return ends_s, {action: timeline.held_s(action) for action in no_earlier_s}


def action_spans(
    actions: Sequence[Sequence[StageAction]], times: StageTimes
) -> list[list[tuple[StageAction, float, float]]]:
    """(action, start, end) of every device, seconds from the start of the step. As
    simulate_actions."""
    timeline = _Timeline(actions, times)
    split = {a.stage for d in actions for a in d if a.kind is Pass.WEIGHT_GRADIENT}

    def span(action: StageAction) -> tuple[StageAction, float, float]:
        end_s = timeline.end_s(action)
        return action, end_s - _seconds(action, times, action.stage in split), end_s

    return [[span(action) for action in device] for device in actions]


def critical_path(
    actions: Sequence[Sequence[StageAction]], times: StageTimes, extra_s: ArrayLike = 0.0
) -> list[StageAction]:
    """A chain of passes that decides when the last device ends (extra_s after its last pass): each
    starts when the one before has ended and its output has arrived. First to last."""
    paths, ends_s = critical_paths(actions, times)
    return paths[int(np.argmax(ends_s + np.asarray(extra_s, float)))]


def critical_paths(
    actions: Sequence[Sequence[StageAction]], times: StageTimes
) -> tuple[list[list[StageAction]], Seconds]:
    """The chain of passes that decides when a device ends, as critical_path, and when that is; of
    every device."""
    timeline = _Timeline(actions, times)
    before = {b: a for device in actions for a, b in zip(device, device[1:], strict=False)}

    def last_of(action: StageAction) -> StageAction | None:
        arrivals = [(timeline.end_s(n) + latency, n) for n, latency in _inputs(action, times)]
        if action in before:
            arrivals.append((timeline.end_s(before[action]), before[action]))
        return max(arrivals)[1] if arrivals else None

    paths = []
    for device in actions:
        path, action = [], device[-1] if device else None
        while action is not None:
            path.append(action)
            action = last_of(action)
        paths.append(path[::-1])
    return paths, np.array([timeline.end_s(d[-1]) if d else 0.0 for d in actions])


class _Timeline:
    """When every action ends; by number, since a pipeline has many: (kind, stage, microbatch) in
    lexicographic order."""

    def __init__(
        self,
        actions: Sequence[Sequence[StageAction]],
        times: StageTimes,
        extra_s: Mapping[StageAction, float] = NONE,
        no_earlier_s: Mapping[StageAction, float] = NONE,
    ) -> None:
        self._stages = len(times.forward_s)
        self._microbatches = 1 + max((a.microbatch for d in actions for a in d), default=0)
        self._ends_s = [-1.0] * (3 * self._stages * self._microbatches)
        split = {a.stage for d in actions for a in d if a.kind is Pass.WEIGHT_GRADIENT}
        seconds = {
            (stage, kind): _seconds(StageAction(stage, kind, 0), times, stage in split)
            for stage in range(self._stages)
            for kind in Pass
        }
        longer = {self._number(a): s for a, s in extra_s.items()}
        self._no_earlier_s = {self._number(a): s for a, s in no_earlier_s.items()}
        self._held_s: dict[int, float] = {}
        orders = [
            [
                (n, self._needs(a, times), seconds[a.stage, a.kind] + longer.get(n, 0.0))
                for n, a in zip(map(self._number, device), device, strict=True)
            ]
            for device in actions
        ]
        position = self._run(orders)
        stuck = [
            f"device {i} at {device[position[i]]}"
            for i, device in enumerate(actions)
            if position[i] < len(device)
        ]
        if stuck:
            raise ValueError(f"the order of actions deadlocks: {', '.join(stuck)}")

    def end_s(self, action: StageAction) -> float:
        """When the action ends."""
        return self._ends_s[self._number(action)]

    def held_s(self, action: StageAction) -> float:
        """How much later the action ends since it cannot end earlier."""
        return self._held_s[self._number(action)]

    def _number(self, action: StageAction) -> int:
        kind = "FBW".index(action.kind)
        return (kind * self._stages + action.stage) * self._microbatches + action.microbatch

    def _needs(self, action: StageAction, times: StageTimes) -> list[tuple[int, float]]:
        return [(self._number(needed), latency) for needed, latency in _inputs(action, times)]

    def _run(self, orders: list[list[tuple[int, list[tuple[int, float]], float]]]) -> list[int]:
        """Runs every device as far as it gets; how far that was."""
        ends_s = self._ends_s
        position = [0] * len(orders)
        clock = [0.0] * len(orders)
        waiting: dict[int, int] = {}
        ready = list(range(len(orders)))
        while ready:
            device = ready.pop()
            while position[device] < len(orders[device]):
                number, needs, seconds = orders[device][position[device]]
                start = clock[device]
                for needed, latency in needs:
                    if ends_s[needed] < 0:
                        waiting[needed] = device
                        break
                    start = max(start, ends_s[needed] + latency)
                else:
                    end_s = start + seconds
                    if number in self._no_earlier_s:
                        self._held_s[number] = max(0.0, self._no_earlier_s[number] - end_s)
                        end_s += self._held_s[number]
                    clock[device] = ends_s[number] = end_s
                    position[device] += 1
                    if number in waiting:
                        ready.append(waiting.pop(number))
                    continue
                break
        return position


def _inputs(action: StageAction, times: StageTimes) -> list[tuple[StageAction, float]]:
    """The actions that must have ended before, with the seconds of their transfer."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Pass.FORWARD:
        if stage == 0:
            return []
        return [(StageAction(stage - 1, Pass.FORWARD, microbatch), float(times.hop_s[stage - 1]))]
    if action.kind is Pass.WEIGHT_GRADIENT:
        return [(StageAction(stage, Pass.BACKWARD, microbatch), 0.0)]
    own = (StageAction(stage, Pass.FORWARD, microbatch), 0.0)
    if stage == len(times.forward_s) - 1:
        return [own]
    return [own, (StageAction(stage + 1, Pass.BACKWARD, microbatch), float(times.hop_s[stage]))]


def _seconds(action: StageAction, times: StageTimes, split: bool) -> float:
    weight_s = float(times.weight_s[action.stage])
    if action.kind is Pass.FORWARD:
        return float(times.forward_s[action.stage])
    if action.kind is Pass.WEIGHT_GRADIENT:
        return weight_s
    return float(times.backward_s[action.stage]) - (weight_s if split else 0.0)
