"""When each device of a pipeline ends, by vectors over devices instead of events one by one.

Serves meshfold.cost_models.pipeline.makespan; equal to its event simulation up to rounding.

1f1b and zero_bubble go in rounds: in round k device i runs F(w_i + k), B(k) and W(k - d_i). The
forward takes its input from an earlier round of device i-1, as w falls from device to device; the
backwards of one round form a chain from the last device to the first,

    end_i = max(F_i's end, end_(i+1) + c_i) + B_i,

a running maximum after prefix sums of B + c are added (_backward_ends_s). Once all ends grow by the
same amount in p rounds, the recurrence being (max,+) linear, they do so as long as every device has
forwards left, and the rounds up to there are skipped (_is_steady).

interleaved goes in slots: device i runs its step k in slot k + p-1-i, so that every input comes
from an earlier slot.
"""

import numpy as np
from numpy.typing import NDArray

from meshfold.cost_models.pipeline.schedules import Schedule

Seconds = NDArray[np.float64]

STEADY_TOLERANCE = 1e-14
"""Difference of growths, relative to the ends themselves, that counts as none (rounding)."""


def one_f_one_b_ends_s(
    schedule: Schedule, f: Seconds, b: Seconds, weight: Seconds, hop: Seconds
) -> Seconds:
    """Ends of the devices under 1f1b or zero_bubble, shape (p,); b is the input gradient where
    weight is not zero."""
    p, m = schedule.num_devices, schedule.num_microbatches
    warm, delay = np.array(schedule.warm_up), np.array(schedule.weight_delay)
    depth = int(max(warm[:-1] - warm[1:], default=0))
    forward_ends = _warm_up_ends_s(f, hop, warm, m + depth, depth)
    flat = forward_ends.reshape(-1)
    # What device i reads in round 0: F(w_i) of device i-1, there in round w_i - w_(i-1).
    inputs = (depth + warm[1:] - warm[:-1]) * p + np.arange(p - 1)
    ascent = np.concatenate(([0.0], np.cumsum(b[:-1] + hop)))
    reach = ascent + b
    free = np.where(warm > 0, forward_ends[depth - 1], 0.0) if depth else np.zeros(p)
    past, arrival = free, np.zeros(p)
    first_steady = max(int(delay.max()), depth) + p
    num_full = m - int(warm[0])
    k = 0
    while k < m:
        np.add(flat.take(inputs + k * p), hop, out=arrival[1:])
        ends = np.maximum(free, arrival) + f
        if k >= num_full:
            ends = np.where(k < m - warm, ends, free)
        forward_ends[depth + k] = ends
        chain = np.maximum.accumulate((ends + reach)[::-1])[::-1]
        free = chain - ascent
        if schedule.splits_backward:
            free += np.where(k >= delay, weight, 0.0)
        if k % p == 0 and k < num_full - 1:
            if k >= first_steady and _is_steady(forward_ends, depth, k, free - past):
                periods = (num_full - 1 - k) // p
                gain = (free[0] - past[0]) * periods
                known = forward_ends[k + 1 : depth + k + 1] + gain
                free, k = free + gain, k + periods * p
                forward_ends[k + 1 : depth + k + 1] = known
            past = free
        k += 1
    deferred: Seconds = np.minimum(m, delay) * weight
    return free + deferred


def _warm_up_ends_s(
    f: Seconds, hop: Seconds, warm: NDArray[np.int64], num_rows: int, depth: int
) -> Seconds:
    """Table of forward ends, row depth + k for round k; the rows before are the last warm-up
    forwards. Forward j of device i ends at the way to it + j * (slowest forward on the way)."""
    table = np.zeros((num_rows, len(f)))
    reached = np.cumsum(f) + np.concatenate(([0.0], np.cumsum(hop)))
    pace = np.maximum.accumulate(f)
    for row in range(depth):
        table[row] = reached + (warm + row - depth) * pace
    return table


def _is_steady(forward_ends: Seconds, depth: int, k: int, growth: Seconds) -> bool:
    """Whether all that rounds after k read has grown alike over the last p rounds.

    `growth`: that of the devices' ends. Growth may repeat with a period of p rounds, a wait
    wandering from device to device, so the rounds skipped have to be a multiple of p.
    """
    p = len(growth)
    recent, before = (forward_ends[row - depth + 1 : row + 1] for row in (depth + k, depth + k - p))
    tolerance = STEADY_TOLERANCE * float(forward_ends[depth + k, 0])
    spread = max(np.abs(recent - before - growth[0]).max(initial=0.0), np.ptp(growth))
    return bool(spread <= tolerance)


def interleaved_ends_s(schedule: Schedule, f: Seconds, b: Seconds, hop: Seconds) -> Seconds:
    """Ends of the devices under the interleaved schedule with v > 1, shape (p,); of many pipelines
    at once, shape (p, n), where f, b and hop have a second dim of n."""
    p, v = schedule.num_devices, schedule.num_virtual_stages
    num_pairs = schedule.num_microbatches * v
    device = np.arange(p)
    # Not clipped at num_pairs: the depths keep their differences, which the slots rely on.
    warm = 2 * (p - 1 - device) + (v - 1) * p
    nothing = np.zeros((1, *f.shape[1:]))
    into, out_of = np.concatenate((nothing, hop)), np.concatenate((hop, nothing))
    # One row more: what is read before anything was written (index -1, or no input at all).
    forward_ends = np.zeros((num_pairs + p + 1, p, *f.shape[1:]))
    backward_ends = np.zeros_like(forward_ends)
    free = np.zeros((p, *f.shape[1:]))
    for slot in range(-int(warm[0]), num_pairs + p - 1):
        step = slot - (p - 1 - device)
        index = np.clip(warm + step, -1, num_pairs)
        run = (index >= 0) & (index < num_pairs)
        stage = index % (p * v) // p * p + device
        arrival = forward_ends[index, device - (device > 0)]
        arrival[0] = forward_ends[index[0] - p, p - 1]
        arrival = _where(stage > 0, arrival + into[stage], nothing)
        free = _where(run, np.maximum(free, arrival) + f[stage], free)
        forward_ends[index[run], device[run]] = free[run]
        step = np.clip(step, -1, num_pairs)
        free = _backward_slot(schedule, step, free, backward_ends, b, out_of)
    return free


def _backward_slot(
    schedule: Schedule,
    step: NDArray[np.int64],
    free: Seconds,
    backward_ends: Seconds,
    b: Seconds,
    out_of: Seconds,
) -> Seconds:
    """The backwards of one slot, into `backward_ends`; returns when the devices are free."""
    p, v = schedule.num_devices, schedule.num_virtual_stages
    device = np.arange(p)
    run = (step >= 0) & (step < schedule.num_microbatches * v)
    stage = (v - 1 - step % (p * v) // p) * p + device
    arrival = backward_ends[step, np.minimum(device + 1, p - 1)]
    arrival[-1] = backward_ends[step[-1] - p, 0]
    arrival = _where(stage < p * v - 1, arrival + out_of[stage], np.zeros_like(free[:1]))
    free = _where(run, np.maximum(free, arrival) + b[stage], free)
    backward_ends[step[run], device[run]] = free[run]
    return free


def _where(mask: NDArray[np.bool_], yes: Seconds, no: Seconds) -> Seconds:
    """np.where with a mask over devices, the first dim."""
    return np.where(mask.reshape(-1, *[1] * (yes.ndim - 1)), yes, no)
