"""What the makespan of a pipeline schedule is checked against: closed formulas, bounds on both
sides.

Notation as in meshfold.cost_models.pipeline.schedules, t_i = F_i + B_i, c_i seconds between the
stages i and i+1 each way.

    A = sum t + (m-1) (max F + max B)  >=  makespan (c = 0)              (makespan_upper_bound_s)
    D = max_i [ pre_i + m t_i + max(0, U_i - w_i F_i) + max(0, U_i - w_i B_i) ]  <=  makespan
                                                                         (makespan_lower_bound_s)

with pre_i the way of a microbatch through the stages before i and back, U_i that through the
stages after i. D holds because stage i starts after pre_i's forwards and ends before its backwards;
between F(0) and B(0) it waits U_i and has w_i forwards to do, between F(m-1) and B(m-1) w_i
backwards. The two waits add up where they are disjoint (m >= w_i + 2); else the larger one counts.
"""

import re

from meshfold.cost_models.pipeline.actions import ActionLists, Pass, StageAction
from meshfold.cost_models.pipeline.makespan import StageTimes, device_ends_s
from meshfold.cost_models.pipeline.schedules import (
    Schedule,
    ScheduleKind,
    backward_order,
    forward_order,
)


def parse_action(text: str) -> StageAction:
    """The action of a text form. Raises ValueError where it is none."""
    found = re.fullmatch(r"(\d+)([FBW])(\d+)", text)
    if found is None:
        raise ValueError(f"{text!r} is no action: expected stage, F, B or W, microbatch ('2F0')")
    return StageAction(int(found[1]), Pass(found[2]), int(found[3]))


def parse_actions(text: str) -> ActionLists:
    """Inverse of actions_text. Raises ValueError for what it would not write."""
    lists = []
    for k, line in enumerate(text.splitlines()):
        number, _, actions = line.partition(": ")
        if number != str(k):
            raise ValueError(f"line {k + 1} is of device {number!r}, expected {k}")
        lists.append(tuple(map(parse_action, actions.split())))
    return tuple(lists)


def makespan_s(schedule: Schedule, times: StageTimes) -> float:
    """Seconds of one step: exact for the model of the module docstring."""
    return float(device_ends_s(schedule, times).max())


def even_makespan_s(
    schedule: Schedule, forward_s: float, backward_s: float, weight_s: float = 0.0
) -> float:
    """Seconds of one step when all stages are equal and transfers take no time: exact.

    forward_s, backward_s (weight_s of it for W): per device and microbatch, all chunks together.
    zero_bubble at the least warm-up is exact for W <= min(F, B) and m >= 2p - 1 only; ValueError
    outside of that.
    """
    p, m, v = schedule.num_devices, schedule.num_microbatches, schedule.num_virtual_stages
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
    if schedule.num_virtual_stages > 1 and schedule.splits_backward:
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
