"""Lower bounds on the interleaved schedule, whatever layers a device gets.

A device is busy with all of its layers for all m microbatches. Its first forward comes after those
of the first stages of the i devices before it, its last backward before theirs, and each of these
stages has a layer: fill_i, the i fastest layers and i transfers (their forwards alone where the
backward is split). Nothing is asked of where virtual stages begin, so the bounds hold for every
division:

    work      p devices share the chain:  makespan >= m LP(sum of M_i) / p + mean of fill_i
    counting  of a run of n equal layers the devices together take n, and device i with c of them
              takes m g_i(c) + fill_i;  the n-th least of these over all i and c >= 1

What a device does once per step, sync_s, runs while the backwards before it do: either these are
in the bound, or sync_s and forwards alone; the higher one counts.

LP is the relaxed least time of all layers (run/hull.py), g_i(c) that of c layers of the run, with
room for the largest of their transients, and the layer at an end of the chain that device i has to
take. What a device needs is bounded by a mean over moments (schedules.counted_in_flight) that all
virtual stages share.
"""

from collections.abc import Callable, Sequence

import numpy as np

from meshfold.cost_models.pipeline.schedules import Schedule, counted_in_flight
from meshfold.passes.run.hull import FloatArray, IntArray, lower_hull, lp_values
from meshfold.passes.stages.problem import LayerCosts, StageProblem
from meshfold.passes.stages.relaxation import transient_groups


def virtual_stage_bound_s(problem: StageProblem, schedule: Schedule) -> float:
    """No plan under the interleaved `schedule` is faster; infinite where none fits."""
    v = schedule.num_virtual_stages
    of_devices = [_in_flight_of_all(moments, v) for moments in counted_in_flight(schedule)]
    in_flight = tuple(map(min, *of_devices, of_devices[0]))
    least = least_transients(problem, schedule)
    bounds = []
    for has_sync in (False, True):
        fill_s = _fill_s(problem, is_forward=has_sync or schedule.splits_backward)
        objective_s = _with_sync_s if has_sync else _total_s
        bounds.append(_work_s(problem, in_flight, objective_s, least) + float(fill_s.mean()))
        run, by_count_s = _by_count_s(problem, schedule, has_sync=has_sync)
        bounds.append(float(np.sort(by_count_s.ravel())[problem.runs[run].count - 1]))
    return max(bounds)


def most_layers(problem: StageProblem, schedule: Schedule, limit_s: float) -> tuple[int, IntArray]:
    """The number of the longest run of equal layers, and how many of them each device has at most
    in a plan faster than limit_s."""
    most = []
    for has_sync in (False, True):
        run, by_count_s = _by_count_s(problem, schedule, has_sync=has_sync)
        counts = np.arange(1, by_count_s.shape[1] + 1)
        most.append(np.where(by_count_s < limit_s, counts, 0).max(axis=1))
    return run, np.min(most, axis=0)


def least_transients(problem: StageProblem, schedule: Schedule) -> IntArray:
    """The transient that each device has at least: stage s begins at layer s at the earliest, as
    each before it has one, and as much later as there are more layers than stages."""
    each = [int(run.layer.transient_bytes.min()) for run in problem.runs]
    of_layers = np.repeat(each, [run.count for run in problem.runs])
    spare = problem.num_layers - schedule.num_stages
    of_stages = [int(of_layers[s : s + spare + 1].min()) for s in range(schedule.num_stages)]
    devices = range(schedule.num_devices)
    return np.array([max(of_stages[s] for s in schedule.stages_of(i)) for i in devices])


def _total_s(costs: LayerCosts, num_microbatches: int) -> FloatArray:
    return costs.total_s


def _with_sync_s(costs: LayerCosts, num_microbatches: int) -> FloatArray:
    return costs.total_s + costs.sync_s / num_microbatches


_Objective = Callable[[LayerCosts, int], FloatArray]
"""Seconds per microbatch of each strategy of a layer, given the number of microbatches."""


def _fill_s(problem: StageProblem, *, is_forward: bool) -> FloatArray:
    """fill_i of the module docstring, by device. is_forward: without backwards."""
    least = [
        float((run.layer.forward_s if is_forward else run.layer.total_s).min())
        for run in problem.runs
    ]
    each_s = np.sort(np.repeat(least, [run.count for run in problem.runs]))
    done_s = np.concatenate(([0.0], np.cumsum(each_s)))
    devices = np.arange(problem.num_devices)
    return np.asarray(done_s[devices] + devices * _least_hop_s(problem))


def _work_s(
    problem: StageProblem, in_flight: tuple[float, ...], objective_s: _Objective, least: IntArray
) -> float:
    """least: the transient that each device has at least."""
    p, m = problem.num_devices, problem.num_microbatches
    types = [
        (objective_s(run.layer, m), _least_bytes(run.layer, in_flight), run.count)
        for run in problem.runs
    ]
    budget = int((problem.memory_bytes - least).sum())
    return m * float(lp_values(types, budget)) / p


def _by_count_s(
    problem: StageProblem, schedule: Schedule, *, has_sync: bool
) -> tuple[int, FloatArray]:
    """The number of the longest run, and m g_i(c) + fill_i of the module docstring, a row for each
    device, a column for c = 1, 2, ..."""
    p, m = problem.num_devices, problem.num_microbatches
    objective_s = _with_sync_s if has_sync else _total_s
    fill_s = _fill_s(problem, is_forward=has_sync or schedule.splits_backward)
    longest = max(range(len(problem.runs)), key=lambda r: (problem.runs[r].count, -r))
    run = problem.runs[longest]
    counts = np.arange(1, run.count + 1)
    values = []
    least = least_transients(problem, schedule)
    for device, moments in zip(range(p), counted_in_flight(schedule), strict=True):
        in_flight = _in_flight_of_all(moments, schedule.num_virtual_stages)
        room = int(problem.memory_bytes[device])
        seconds = 0.0
        at_last = device == schedule.device_of(schedule.num_stages - 1)
        for at_end, end in ((device == 0, 0), (at_last, len(problem.runs) - 1)):
            if at_end and end != longest:
                layer = problem.runs[end].layer
                seconds += float(objective_s(layer, m).min())
                room -= int(_least_bytes(layer, in_flight).min())
        of_layers = objective_s(run.layer, m), _least_bytes(run.layer, in_flight)
        layers_s = _layers_s(run.layer, of_layers, room, int(least[device]), counts)
        values.append(m * (seconds + layers_s) + fill_s[device])
    return longest, np.array(values)


def _layers_s(
    layer: LayerCosts, of: tuple[FloatArray, IntArray], room: int, least: int, counts: IntArray
) -> FloatArray:
    """g_i(c): the strategies up to the largest of some transients, beside the least of them. of:
    seconds and bytes of the strategies; least: the transient that the device has at least."""
    best_s = np.full(len(counts), np.inf)
    for largest, smallest in transient_groups([layer], len(layer.transient_bytes)):
        allowed = layer.transient_bytes <= largest
        hull = lower_hull(*(column[allowed] for column in of))
        best_s = np.minimum(best_s, hull.time_at_s(room - max(smallest, least), counts))
    return best_s


def _in_flight_of_all(resident: Sequence[tuple[int, ...]], num_stages: int) -> tuple[float, ...]:
    """Microbatches in flight in every virtual stage of a device at least, at one moment or in the
    mean; apart as `resident` has them, which is of the device, by moment."""
    moments = np.array(resident, float).reshape(len(resident), -1, num_stages)
    each = [*moments.min(axis=2), moments.mean(axis=0).min(axis=1)]
    return tuple(max(each, key=lambda n: (float(n.sum()), tuple(n))).tolist())


def _least_bytes(costs: LayerCosts, in_flight: tuple[float, ...]) -> IntArray:
    # Linear, for means of moments.
    return np.floor(costs.state_bytes + costs.passes_bytes(in_flight)).astype(np.int64)


def _least_hop_s(problem: StageProblem) -> float:
    return float(problem.hop_s[1:-1].min(initial=np.inf))
