"""Step time of a pipeline schedule: exact simulation, closed formulas, bounds on both sides.

Notation: p devices, m microbatches, w_i warm-up forwards; F_i, B_i seconds of forward and backward
of stage i per microbatch, t_i = F_i + B_i, c_i seconds between the stages i and i+1 each way.

    makespan   the last pass ends, every pass after its inputs and its device's pass before it
    A = sum t + (m-1) (max F + max B)  >=  makespan (c = 0)              (makespan_upper_bound_s)
    D = max_i [ pre_i + m t_i + max(0, U_i - w_i F_i) + max(0, U_i - w_i B_i) ]  <=  makespan
                                                                         (makespan_lower_bound_s)

with pre_i the way of a microbatch through the stages before i and back, U_i that through the
stages after i. D holds because stage i starts after pre_i's forwards and ends before its backwards;
between F(0) and B(0) it waits U_i and has w_i forwards to do, between F(m-1) and B(m-1) w_i
backwards. The two waits add up where they are disjoint (m >= w_i + 2); else the larger one counts.

`simulate_actions` runs any order of actions event by event; `device_ends_s` gives the same numbers
for the schedules of meshfold.cost_models.pipeline.schedules by vectors over devices (pipeline_rounds).
Transfers overlap compute and do not queue behind each other. Seconds throughout.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshfold.cost_models.pipeline.actions import Action, Pass
from meshfold.cost_models.pipeline.schedules import (
    Schedule,
    ScheduleKind,
    backward_order,
    forward_order,
)
from meshfold.cost_models.pipeline.vector_makespan import interleaved_ends_s, one_f_one_b_ends_s

Seconds = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class StageTimes:
    """Seconds per microbatch of each stage (with chunks: stage s on device s mod p).

    backward_s: the whole backward; weight_s: the part of it that only makes weight gradients;
    hop_s: from stage s to s+1 and back again, each way, one entry less than stages.
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
            raise ValueError("the weight gradient is a part of the backward, but takes longer")
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
        """The same times where nothing travels from a stage to the next on its device: where the
        way of a V turns."""
        hop = np.where([schedule.travels(s) for s in range(1, schedule.num_stages)], self.hop_s, 0)
        return StageTimes(self.forward_s, self.backward_s, self.weight_s, hop)


def makespan_s(schedule: Schedule, times: StageTimes) -> float:
    """Seconds of one step: exact for the model of the module docstring."""
    return float(device_ends_s(schedule, times).max())


def device_ends_s(schedule: Schedule, times: StageTimes) -> Seconds:
    """When each device ends its last pass, shape (num_devices,)."""
    parts = times.for_schedule(schedule)
    f, b, hop = parts.forward_s, parts.backward_s, parts.hop_s
    if schedule.num_chunks > 1 and schedule.splits_backward:
        return simulate_actions(schedule.actions(), times.between_devices(schedule))
    if schedule.kind is ScheduleKind.GPIPE:
        return _gpipe_ends_s(schedule.num_microbatches, f, b, hop)
    if schedule.num_chunks > 1:
        return interleaved_ends_s(schedule, f, b, hop)
    return one_f_one_b_ends_s(schedule, f, b, parts.weight_s, hop)


def _gpipe_ends_s(num_microbatches: int, f: Seconds, b: Seconds, hop: Seconds) -> Seconds:
    """Equal jobs through a flow shop end at sum + (m-1) max of the times on their way: forwards
    down, then backwards up."""
    later = num_microbatches - 1
    forwards_s = float(f.sum() + hop.sum() + later * f.max())
    way_up: Seconds = (b + np.append(hop, 0.0))[::-1].cumsum()[::-1]
    slowest_up: Seconds = np.maximum.accumulate(b[::-1])[::-1]
    return forwards_s + way_up + later * slowest_up


def simulate_actions(actions: Sequence[Sequence[Action]], times: StageTimes) -> Seconds:
    """When each device ends, given the actions of each in order (any order, any number of chunks).

    A W in the actions of a stage makes its B the input gradient. Raises ValueError for a deadlock,
    naming the action each stuck device waits with.
    """
    timeline = _Timeline(actions, times)
    return np.array([timeline.end_s(device[-1]) if device else 0.0 for device in actions])


def action_spans(
    actions: Sequence[Sequence[Action]], times: StageTimes
) -> list[list[tuple[Action, float, float]]]:
    """(action, start, end) of every device, seconds from the start of the step. As
    simulate_actions."""
    timeline = _Timeline(actions, times)
    split = {a.stage for d in actions for a in d if a.kind is Pass.WEIGHT_GRADIENT}

    def span(action: Action) -> tuple[Action, float, float]:
        end_s = timeline.end_s(action)
        return action, end_s - _seconds(action, times, action.stage in split), end_s

    return [[span(action) for action in device] for device in actions]


def critical_path(
    actions: Sequence[Sequence[Action]], times: StageTimes, extra_s: ArrayLike = 0.0
) -> list[Action]:
    """A chain of passes that decides when the last device ends (extra_s after its last pass): each
    starts when the one before has ended and its output has arrived. First to last."""
    timeline = _Timeline(actions, times)
    before = {b: a for device in actions for a, b in zip(device, device[1:], strict=False)}
    late_s = np.broadcast_to(np.asarray(extra_s, float), (len(actions),))
    finish_s = [timeline.end_s(d[-1]) + late for d, late in zip(actions, late_s, strict=True)]
    path = [actions[int(np.argmax(finish_s))][-1]]
    while True:
        action = path[-1]
        arrivals = [(timeline.end_s(n) + latency, n) for n, latency in _inputs(action, times)]
        if action in before:
            arrivals.append((timeline.end_s(before[action]), before[action]))
        if not arrivals:
            return path[::-1]
        path.append(max(arrivals)[1])


class _Timeline:
    """When every action ends; by number, since a pipeline has many: (kind, stage, microbatch) in
    lexicographic order."""

    def __init__(self, actions: Sequence[Sequence[Action]], times: StageTimes) -> None:
        self._stages = len(times.forward_s)
        self._microbatches = 1 + max((a.microbatch for d in actions for a in d), default=0)
        self._ends_s = [-1.0] * (3 * self._stages * self._microbatches)
        split = {a.stage for d in actions for a in d if a.kind is Pass.WEIGHT_GRADIENT}
        seconds = {
            (stage, kind): _seconds(Action(stage, kind, 0), times, stage in split)
            for stage in range(self._stages)
            for kind in Pass
        }
        orders = [
            [(self._number(a), self._needs(a, times), seconds[a.stage, a.kind]) for a in device]
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

    def end_s(self, action: Action) -> float:
        """When the action ends."""
        return self._ends_s[self._number(action)]

    def _number(self, action: Action) -> int:
        kind = "FBW".index(action.kind)
        return (kind * self._stages + action.stage) * self._microbatches + action.microbatch

    def _needs(self, action: Action, times: StageTimes) -> list[tuple[int, float]]:
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
                    clock[device] = ends_s[number] = start + seconds
                    position[device] += 1
                    if number in waiting:
                        ready.append(waiting.pop(number))
                    continue
                break
        return position


def _inputs(action: Action, times: StageTimes) -> list[tuple[Action, float]]:
    """The actions that must have ended before, with the seconds their output travels."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Pass.FORWARD:
        if stage == 0:
            return []
        return [(Action(stage - 1, Pass.FORWARD, microbatch), float(times.hop_s[stage - 1]))]
    if action.kind is Pass.WEIGHT_GRADIENT:
        return [(Action(stage, Pass.BACKWARD, microbatch), 0.0)]
    own = (Action(stage, Pass.FORWARD, microbatch), 0.0)
    if stage == len(times.forward_s) - 1:
        return [own]
    return [own, (Action(stage + 1, Pass.BACKWARD, microbatch), float(times.hop_s[stage]))]


def _seconds(action: Action, times: StageTimes, split: bool) -> float:
    weight_s = float(times.weight_s[action.stage])
    if action.kind is Pass.FORWARD:
        return float(times.forward_s[action.stage])
    if action.kind is Pass.WEIGHT_GRADIENT:
        return weight_s
    return float(times.backward_s[action.stage]) - (weight_s if split else 0.0)


def even_makespan_s(
    schedule: Schedule, forward_s: float, backward_s: float, weight_s: float = 0.0
) -> float:
    """Seconds of one step when all stages are equal and transfers take no time: exact.

    forward_s, backward_s (weight_s of it for W): per device and microbatch, all chunks together.
    zero_bubble at the least warm-up is exact for W <= min(F, B) and m >= 2p - 1 only; ValueError
    outside of that.
    """
    p, m, v = schedule.num_devices, schedule.num_microbatches, schedule.num_chunks
    total_s = forward_s + backward_s
    if not schedule.splits_backward:
        return m * total_s + (p - 1) * total_s / v
    if v > 1:
        raise ValueError(f"no closed formula for {schedule}")
    input_s = backward_s - weight_s
    if weight_s > min(forward_s, input_s) or m < 2 * p - 1 or schedule.extra_warm_up:
        raise ValueError(f"no closed formula for {schedule} with these times")
    return m * total_s + (p - 1) * (forward_s + input_s - weight_s)


def makespan_upper_bound_s(schedule: Schedule, times: StageTimes) -> float:
    """A of the module docstring. Raises ValueError for transfers that take time and for schedules
    other than 1f1b and gpipe, where it does not hold."""
    plain = schedule.kind in (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B)
    if not plain or times.hop_s.any():
        raise ValueError(f"no upper bound in closed form for {schedule} with these transfers")
    slowest_s = float(times.forward_s.max() + times.backward_s.max())
    return float(times.total_s.sum()) + (schedule.num_microbatches - 1) * slowest_s


def makespan_lower_bound_s(schedule: Schedule, times: StageTimes) -> float:
    """D of the module docstring, with transfers; where several chunks split their backward, only
    that every device does its work."""
    if schedule.kind is ScheduleKind.GPIPE:
        return makespan_s(schedule, times)
    if schedule.num_chunks > 1 and schedule.splits_backward:
        devices = range(schedule.num_devices)
        busy_s = [float(times.total_s[list(schedule.stages_of(i))].sum()) for i in devices]
        return schedule.num_microbatches * max(busy_s)
    parts = times.for_schedule(schedule)
    return max(_device_bound_s(schedule, parts, i) for i in range(schedule.num_devices))


def _device_bound_s(schedule: Schedule, parts: StageTimes, device: int) -> float:
    """D of one device. With chunks it waits on the way from its first stage to its last one and
    back; with split backward it may end before its last weight gradients or after them."""
    f, b, hop = parts.forward_s, parts.backward_s, parts.hop_s
    last = schedule.num_stages - schedule.num_devices + device
    forwards, backwards = forward_order(schedule, device), backward_order(schedule, device)
    warm = min(schedule.warm_up[device], len(forwards) - 1)
    weight_s = float(parts.weight_s[device])
    around_s = float(hop[device:].sum() + hop[last:].sum())
    head_s = float(f[device + 1 :].sum() + b[last + 1 :].sum()) + around_s
    tail_s = float(f[last + 1 :].sum() + b[device + 1 :].sum()) + around_s
    head_work_s = sum(float(f[s]) for s, _ in forwards[1 : warm + 1])
    tail_work_s = sum(float(b[s]) for s, _ in backwards[-1 - warm : -1]) + warm * weight_s
    waits = (max(0.0, head_s - head_work_s), max(0.0, tail_s - tail_work_s))
    wait_s = sum(waits) if len(forwards) - 1 > warm else max(waits)
    stages = slice(device, None, schedule.num_devices)
    busy_s = schedule.num_microbatches * float((f[stages] + b[stages]).sum())
    way_s = float(f[:device].sum() + hop[:device].sum())
    start_s = way_s + busy_s + wait_s
    before_last = max(0, schedule.num_microbatches - 1 - schedule.weight_delay[device])
    back_s = float(b[:device].sum() + hop[:device].sum() + parts.weight_s[0])
    if device == 0:
        return start_s + schedule.num_microbatches * weight_s
    return start_s + max(schedule.num_microbatches * weight_s, before_last * weight_s + back_s)
