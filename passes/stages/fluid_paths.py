"""A lower bound on schedules of several virtual stages, from the chains of passes that decide when
they end.

The order of a schedule's actions does not depend on where stages begin, so every chain through it,
each pass after its input or after the pass before it on its device, is a bound on every division:
a sum of forwards, backwards and transfers. So is a mix of chains whose shares add up to one. Layers
are fluid: x[s, r, k] of run r are in stage s under strategy k, and the step is at least

    min z   over   seconds of the chain at x + sync_s of its last device <= z        every chain
                   sum_rk x[s, r, k] >= 1                                       every stage s
                   sum (state + in flight * activation + (transient - u_i)+ / c_i) x
                     + in flight * least that arrives <= memory - u_i
                                                              every device i, every moment
                   sum_sk x[s, r, k] = n_r                                        every run r
                   sum_sk x[s, r, k] <= c_i       of the longest run, s of device i, every i

with c_i the layers that device i has at most in a plan that is faster than the limit: layers are
whole, and one more would take too long (virtual_stage_bounds.most_layers); u_i the transient that
device i has at least, whichever layers its stages begin with. Its largest transient is no less than
the mean over c_i layers, those that it does not have at u_i; (y)+ counts for the longest run.

There are too many chains to write down. The first ones are those that decide when each device of
the best known plan ends; where they leave a gap, all passes of the schedule are variables of one
linear program, and the prices of its solution are a mix of chains (_priced_mix). The solver's
answer is not taken at its word: the bound is the dual objective of its prices, over chains that
exist (memory_bound.least_z).
"""

from dataclasses import dataclass

import numpy as np

from meshfold.cost_models.pipeline.actions import ActionLists, Pass
from meshfold.cost_models.pipeline.makespan import StageTimes, critical_paths
from meshfold.cost_models.pipeline.schedules import Schedule, counted_in_flight
from meshfold.passes.run.hull import FloatArray, IntArray
from meshfold.passes.stages.memory_bound import least_z
from meshfold.passes.stages.pass_prices import PathMix, PriceProblem, priced_mix
from meshfold.passes.stages.problem import LayerCosts, StageProblem
from meshfold.passes.stages.virtual_stage_bounds import least_transients, most_layers

MAX_COLUMNS = 8192
"""Variables of the linear program; larger ones are not solved."""

MAX_PRICED = 6500
"""Passes of a schedule that all become variables: some 1.5 CPU seconds."""

KnownMixes = dict[Schedule, list[PathMix]]
"""Chains of a schedule are chains of every problem; what one was priced for bounds others, too."""


def fluid_paths_bound_s(
    problem: StageProblem,
    schedule: Schedule,
    times: StageTimes,
    limit_s: float,
    tolerance: float,
    known: KnownMixes | None = None,
) -> float:
    """No plan under `schedule` is faster than this or limit_s; 0 where the program would be too
    large. times: of the stages of a good plan. tolerance: a bound this close to limit_s is enough.
    known: takes up what is priced here.
    """
    columns = _columns(problem, schedule)
    if len(columns.stage) > MAX_COLUMNS:
        return 0.0
    program = _Program(problem, schedule, columns, limit_s)
    actions = schedule.actions()
    priced = [] if known is None else known.setdefault(schedule, [])
    program.mixes += _chains(actions, times.between_devices(schedule), schedule)
    program.mixes += priced
    bound_s = program.bound_s()
    if bound_s * (1 + tolerance) < limit_s and sum(map(len, actions)) <= MAX_PRICED:
        mix = priced_mix(actions, program.as_prices())
        priced += [mix] if mix else []
        program.mixes += [mix] if mix else []
        bound_s = max(bound_s, program.bound_s())
    return bound_s


def _chains(actions: ActionLists, times: StageTimes, schedule: Schedule) -> list[PathMix]:
    """The chain of every device at `times`."""
    num_stages, p = schedule.num_stages, schedule.num_devices
    found = []
    for device, path in enumerate(critical_paths(actions, times)[0]):
        passes = {
            kind: _numbers([a.stage for a in path if a.kind is kind], num_stages) for kind in Pass
        }
        hops = [
            min(a.stage, b.stage)
            for a, b in zip(path, path[1:], strict=False)
            if a.stage != b.stage and a.microbatch == b.microbatch and a.kind is b.kind
        ]
        found.append(PathMix(passes, _numbers(hops, num_stages - 1), _numbers([device], p)))
    return found


def _numbers(places: list[int], size: int) -> FloatArray:
    """How often each place occurs."""
    return np.bincount(places, minlength=size).astype(float)


@dataclass(frozen=True, eq=False)
class _Columns:
    """The variables x, one entry each; backward_s and weight_s as the schedule has them."""

    stage: IntArray
    run: IntArray
    forward_s: FloatArray
    backward_s: FloatArray
    weight_s: FloatArray
    sync_s: FloatArray
    state_bytes: FloatArray
    activation_bytes: FloatArray
    put_off_bytes: FloatArray
    update_bytes: FloatArray
    transient_bytes: FloatArray


def _columns(problem: StageProblem, schedule: Schedule) -> _Columns:
    """Stage s begins at layer s at the earliest, as each before it has one, and ends as late."""
    spare = problem.num_layers - schedule.num_stages
    rows = []
    for number, run in enumerate(problem.runs):
        first, end = problem.starts[number], problem.starts[number + 1]
        each = _undominated(run.layer, splits_backward=schedule.splits_backward)
        for stage in range(max(0, first - spare), min(schedule.num_stages, end)):
            rows += [(stage, number, *figures) for figures in each]
    stage, run_of, *figures = np.array(rows).T
    return _Columns(stage.astype(np.int64), run_of.astype(np.int64), *figures)


def _undominated(layer: LayerCosts, *, splits_backward: bool) -> list[tuple[float, ...]]:
    """Strategies that no other one equals or beats in everything."""
    weight_s = layer.weight_s if splits_backward else np.zeros_like(layer.weight_s)
    table = np.column_stack(
        [
            layer.forward_s,
            layer.backward_s - weight_s,
            weight_s,
            layer.sync_s,
            layer.state_bytes,
            layer.activation_bytes,
            layer.put_off_bytes if splits_backward else np.zeros_like(layer.put_off_bytes),
            layer.update_bytes,
            layer.transient_bytes,
        ]
    )
    kept: list[FloatArray] = []
    for row in table[np.lexsort(table.T[::-1])]:
        if not any((other <= row).all() for other in kept):
            kept.append(row)
    return [tuple(row.tolist()) for row in kept]


class _Program:
    """The linear program of the module docstring; mixes: the chains that are known."""

    def __init__(
        self, problem: StageProblem, schedule: Schedule, columns: _Columns, limit_s: float
    ) -> None:
        self.mixes: list[PathMix] = []
        self._columns = columns
        device_of = np.array([schedule.device_of(s) for s in range(schedule.num_stages)])
        self._device = device_of[columns.stage]
        devices = np.arange(schedule.num_devices)[:, None]
        self._hop_s = _hops_s(problem, schedule)
        self._counts = np.array([run.count for run in problem.runs], float)
        self._is_run = (columns.run == np.arange(len(problem.runs))[:, None]).astype(float)
        run, most = most_layers(problem, schedule, limit_s)
        transients = _in_the_mean(problem, schedule, columns, self._device, (run, most))
        memory, room = _memory(problem, schedule, columns, transients)
        self._fits = bool((room > 0).all())
        in_stage = (columns.stage == np.arange(schedule.num_stages)[:, None]).astype(float)
        self._left = np.vstack(
            [
                memory / np.maximum(room, 1.0)[:, None],
                (columns.run == run) * (self._device == devices).astype(float),
                -in_stage,
            ]
        )
        self._limits = np.concatenate([np.ones(len(memory)), most, -np.ones(schedule.num_stages)])

    def bound_s(self) -> float:
        """What the chains that are known prove; infinite where nothing fits."""
        if not self._fits:
            return float("inf")
        rows, hops_s = map(np.array, zip(*map(self._row, self.mixes), strict=True))
        scale = float(rows.max(initial=0.0) * self._counts.sum())
        if scale == 0.0:
            return 0.0
        left = np.vstack([rows / scale, self._left])
        of_z = -(np.arange(len(left)) < len(rows)).astype(float)
        limits = np.concatenate([-hops_s / scale, self._limits])
        return scale * least_z(left, of_z, limits, self._columns.run, self._counts)

    def as_prices(self) -> PriceProblem:
        """The program with all passes of the schedule instead of chains."""
        columns = self._columns
        seconds = {
            Pass.FORWARD: columns.forward_s,
            Pass.BACKWARD: columns.backward_s,
            Pass.WEIGHT_GRADIENT: columns.weight_s,
        }
        return PriceProblem(
            columns.stage,
            seconds,
            (self._device == np.arange(self._device.max() + 1)[:, None]) * columns.sync_s,
            self._hop_s,
            (self._left, self._limits),
            (self._is_run, self._counts),
        )

    def _row(self, mix: PathMix) -> tuple[FloatArray, float]:
        """(seconds by variable, seconds of transfers)."""
        columns = self._columns
        row = (
            mix.passes[Pass.FORWARD][columns.stage] * columns.forward_s
            + mix.passes[Pass.BACKWARD][columns.stage] * columns.backward_s
            + mix.passes[Pass.WEIGHT_GRADIENT][columns.stage] * columns.weight_s
            + mix.ends[self._device] * columns.sync_s
        )
        return row, float(mix.hops @ self._hop_s)


def _in_the_mean(
    problem: StageProblem,
    schedule: Schedule,
    columns: _Columns,
    device_of: IntArray,
    at_most: tuple[int, IntArray],
) -> FloatArray:
    """What a layer's transient adds to that of its device beyond the least, in the mean over the
    most layers that it has, a row per device. at_most: a run, and its layers by device."""
    run, most = at_most
    least = least_transients(problem, schedule)
    rows = np.zeros((schedule.num_devices, len(columns.stage)))
    for device in range(schedule.num_devices):
        beyond = np.maximum(0.0, columns.transient_bytes - least[device])
        of_run = (device_of == device) & (columns.run == run)
        rows[device] = np.where(of_run, beyond / max(1, most[device]), 0.0)
    return rows


def _memory(
    problem: StageProblem, schedule: Schedule, columns: _Columns, transients: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """(bytes of each variable, bytes there are) of every device at every moment. transients: what a
    variable has of that of its device, a row per device."""
    least = least_transients(problem, schedule)
    arrived = _arrived(problem, schedule)
    rows, room = [], []
    kept = (columns.activation_bytes, columns.put_off_bytes)
    for device, moments in enumerate(counted_in_flight(schedule)):
        own = list(schedule.stages_of(device))
        is_own = np.isin(columns.stage, own)
        for in_flight in moments:
            arrives = float(arrived[own] @ np.reshape(in_flight, (-1, len(own)))[0])
            in_all, any_left = np.zeros(len(columns.stage)), np.zeros(len(columns.stage), bool)
            for counts, num_bytes in zip(np.reshape(in_flight, (-1, len(own))), kept, strict=False):
                of_stage = np.zeros(schedule.num_stages)
                of_stage[own] = counts
                in_all += of_stage[columns.stage] * num_bytes
                any_left |= of_stage[columns.stage] > 0
            behind = np.where(any_left, columns.update_bytes, 0.0)
            each = columns.state_bytes + np.maximum(in_all, behind)
            rows.append(is_own * each + transients[device])
            room.append(float(problem.memory_bytes[device] - least[device]) - arrives)
    return np.array(rows), np.array(room)


def _arrived(problem: StageProblem, schedule: Schedule) -> FloatArray:
    """The least bytes that arrive in each stage of a microbatch, wherever it begins."""
    spare = problem.num_layers - schedule.num_stages
    starts = range(schedule.num_stages)
    return np.array([float(problem.resident_bytes[s : s + spare + 1].min()) for s in starts])


def _hops_s(problem: StageProblem, schedule: Schedule) -> FloatArray:
    """The least seconds of each stage's way to the next, wherever stages begin."""
    spare = problem.num_layers - schedule.num_stages
    return np.array(
        [
            float(problem.hop_s[s : s + spare + 1].min()) if schedule.crosses_devices(s) else 0.0
            for s in range(1, schedule.num_stages)
        ]
    )
