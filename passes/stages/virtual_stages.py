"""Divisions of a chain for the interleaved schedule: p v stages, stage s on device s mod p.

A device has v spans of layers, so the dynamic program over divisions of one stage per device
(bounds.py) does not apply. Instead:

    1. bounds that hold for every division        (virtual_stage_bounds.py, fluid_paths.py)
    2. start from divisions of even times and of even numbers of layers
    3. move single layers between stages; all neighbours are judged by     (_judge_s)

           max over devices i and virtual stages r of   m W_i + sum_{j < i} t_(j,r)
                                                + p sum_{q < r} (t_(0,q) - t_(i,q))

       a path of passes: device 0 until F(r, 0), down to device i, there until B(r, m-1), and back;
       t_(j,r) is virtual stage r of device j, W_i the sum over its virtual stages
    4. the most promising ones are solved (virtual_stage_solver.py) and simulated together; repeat
       from 3 as long as one is faster
    5. what is found, and where 2 started, with one strategy for all layers of the longest run:
       stages that are each as fast as their device allows wait for one another where their times
       differ
    6. of the best schedules, 3 and 4 again from divisions a few random moves away (find_further)

Points 2 to 6 find a plan and prove nothing; what is proven is 1. Schedules of several virtual
stages that split the backward are searched alike, judged by the busiest device and simulated in
waves of actions (cost_models/pipeline/waves.py).
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property

import numpy as np

from meshfold.cost_models.pipeline.makespan import StageTimes
from meshfold.cost_models.pipeline.schedules import Schedule
from meshfold.cost_models.pipeline.vector_makespan import interleaved_ends_s
from meshfold.cost_models.pipeline.waves import Waves
from meshfold.passes.run.hull import FloatArray, IntArray
from meshfold.passes.stages.answer import PipelinePlan, Stage
from meshfold.passes.stages.fluid_paths import KnownMixes, fluid_paths_bound_s
from meshfold.passes.stages.moves import BoundaryRows, neighbours
from meshfold.passes.stages.problem import InFlight, StageProblem
from meshfold.passes.stages.solved import stage_times
from meshfold.passes.stages.virtual_stage_bounds import virtual_stage_bound_s
from meshfold.passes.stages.virtual_stage_solver import VirtualStageSolver

SHORTLIST_SIZE = 6
"""Neighbours of a division that are solved and simulated before it counts as the best around."""

MAX_ROUNDS = 12
"""Moves of one layer after another; starts are close to even, so few are needed."""

MOST_MOVES = 4
"""Of layers, that lead from the best division to where find_further starts."""

SLOWED = 1.005
"""Multiple of the least time of all layers from which on memory slows them."""


class VirtualStageSearch:
    """The best plan under one interleaved schedule, and what is proven about it; attributes as of
    boundaries.BoundarySearch."""

    def __init__(self, problem: StageProblem, schedule: Schedule) -> None:
        self.problem, self.schedule = problem, schedule
        self.step_s = self.first_step_s = float("inf")
        self.bound_s = virtual_stage_bound_s(problem, schedule)
        self.capped = False
        self.solver = VirtualStageSolver(problem, schedule)
        self._stages: tuple[Stage, ...] = ()
        self._least: dict[InFlight, FloatArray] = {}
        self._seen: set[tuple[int, ...]] = set()
        fastest = [float(run.layer.total_s.min()) for run in problem.runs]
        self._layer_s = np.repeat(fastest, [run.count for run in problem.runs])
        self._fastest_s = float(self._layer_s.sum())

    def close(self, limit_s: float, tolerance: float) -> None:
        """Looks for a plan unless none can be faster than limit_s by more than the tolerance, and
        raises the bound by what chains of passes prove."""
        if self.bound_s * (1 + tolerance) < limit_s:
            self._search()
            self.prove(limit_s, tolerance)

    def find(self, limit_s: float) -> None:
        """Looks for a plan, unless none can be faster than limit_s; proves nothing."""
        if self.bound_s < limit_s:
            self._search()

    def find_further(self, num_starts: int) -> None:
        """Looks for a plan from divisions that are up to MOST_MOVES random moves of layers away
        from the best one (iterated local search; the draws are always the same), if memory slows
        its layers: where devices are full, a single move seldom leads from one good division to the
        next. Proves nothing."""
        if not self._stages or self._layer_s.sum() <= SLOWED * self._fastest_s:
            return
        draws = np.random.default_rng(0)
        for number in range(num_starts):
            start = self.division
            for _ in range(1 + number % MOST_MOVES):
                around = neighbours(start)
                start = (
                    tuple(around[draws.integers(len(around))].tolist()) if len(around) else start
                )
            beside = copy(self)
            beside.step_s, beside._stages, beside._seen = np.inf, (), set()
            beside._climb(np.array([start]))
            if beside.step_s < self.step_s:
                self.step_s, self._stages = beside.step_s, beside._stages
                self._layer_s = beside._layer_s

    def find_beside(self, stages: Sequence[Stage]) -> None:
        """Looks for a plan, also one that divides the layers as these stages; proves nothing."""
        division = (*(stage.first for stage in stages), self.problem.num_layers)
        self.try_divisions(self.solver, [division])
        self._search()

    @property
    def proven_s(self) -> float:
        """The bound, no more than the step of the plan."""
        return min(self.bound_s, self.step_s)

    def prove(self, limit_s: float, tolerance: float, known: KnownMixes | None = None) -> None:
        """Raises the bound by what chains of passes prove: no more than limit_s and the step of the
        plan, if one is found, and as far as the tolerance asks. known: see fluid_paths_bound_s."""
        beat_s = min(limit_s, self.step_s)
        if self.bound_s * (1 + tolerance) < beat_s:
            of = self.problem, self.schedule, self._times, beat_s, tolerance, known
            proven_s = fluid_paths_bound_s(*of)
            self.bound_s = max(self.bound_s, min(beat_s, proven_s))

    @property
    def _times(self) -> StageTimes:
        """Of the plan; without one, of even stages of layers at their fastest."""
        if self._stages:
            hop_s = self.problem.hop_s[[stage.first for stage in self._stages[1:]]]
            return stage_times(self._stages, hop_s)
        boundaries = even_divisions(self._layer_s, self.schedule.num_stages)[0]
        return even_times(self.problem, np.array(boundaries))

    def _search(self) -> None:
        """Points 2 to 5 of the module docstring."""
        even = np.array(even_divisions(self._layer_s, self.schedule.num_stages))
        self._climb(even)
        if self._stages:
            divisions = list(dict.fromkeys([self.division, *map(tuple, even.tolist())]))
            for solver in self._alike_solvers():
                if self.try_divisions(solver, divisions):
                    break

    def _climb(self, around: BoundaryRows) -> None:
        """Points 3 and 4 of the module docstring, from the best of these divisions on."""
        for _ in range(MAX_ROUNDS):
            ranked = [
                boundaries for boundaries in self._ranked(around) if boundaries not in self._seen
            ]
            self._seen.update(ranked[:SHORTLIST_SIZE])
            if self.try_divisions(self.solver, ranked[:SHORTLIST_SIZE]):
                center = tuple(stage.first for stage in self._stages)
            elif self._stages or not ranked:
                break
            else:
                center = ranked[0][:-1]
            around = neighbours((*center, self.problem.num_layers))

    @property
    def division(self) -> tuple[int, ...]:
        """Of the best plan: the first layer of each stage, and the number of layers."""
        return (*(stage.first for stage in self._stages), self.problem.num_layers)

    def _alike_solvers(self) -> Iterator[VirtualStageSolver]:
        """Solvers that give all layers of the longest run one strategy, the fastest first."""
        runs = list(self.problem.runs)
        longest = max(range(len(runs)), key=lambda r: (runs[r].count, -r))
        costs = runs[longest].layer
        if len(costs.strategies) < 2:
            return
        step_s = costs.total_s + costs.sync_s / self.problem.num_microbatches
        for at in np.argsort(step_s, kind="stable").tolist():
            alone = replace(runs[longest], layer=costs.only(at))
            of = replace(self.problem, runs=(*runs[:longest], alone, *runs[longest + 1 :]))
            yield VirtualStageSolver(of, self.schedule, self.solver.in_flight)

    def plan(self, lower_s: float, capped: bool) -> PipelinePlan:
        """The best plan found."""
        return PipelinePlan(
            self.problem.num_layers,
            self.schedule,
            self._stages,
            tuple(self.problem.memory_bytes.tolist()),
            self.step_s,
            self.first_step_s,
            lower_s,
            capped,
        )

    def _ranked(self, boundaries: BoundaryRows) -> list[tuple[int, ...]]:
        """Divisions that fit first, then those that miss the least bytes; the fastest first."""
        missing = np.maximum(self._overrun(boundaries), 0.0)
        order = np.lexsort((*boundaries.T[::-1], self._judge_s(boundaries), missing))
        return list(dict.fromkeys(tuple(boundaries[at].tolist()) for at in order))

    def _judge_s(self, boundaries: BoundaryRows) -> FloatArray:
        """The paths of the module docstring, at the present times of the layers."""
        p, v, m = (
            self.schedule.num_devices,
            self.schedule.num_virtual_stages,
            self.schedule.num_microbatches,
        )
        done = np.concatenate(([0.0], np.cumsum(self._layer_s)))
        each_s = np.diff(done[boundaries], axis=1)
        if self.schedule.splits_backward:
            own = [list(self.schedule.stages_of(i)) for i in range(p)]
            return np.asarray(m * np.max([each_s[:, s].sum(axis=1) for s in own], axis=0))
        stage_s = each_s.reshape(-1, v, p)
        turn_s = stage_s + 2 * self.problem.hop_s[boundaries[:, 1:]].reshape(-1, v, p)
        turn_s = np.cumsum(turn_s, axis=2) - turn_s
        swapped_s = np.cumsum(stage_s[:, :, :1] - stage_s, axis=1)
        swapped_s = np.concatenate((np.zeros_like(swapped_s[:, :1]), swapped_s[:, :-1]), axis=1)
        paths_s = m * stage_s.sum(axis=1, keepdims=True) + turn_s + p * swapped_s
        return np.asarray(paths_s.max(axis=(1, 2)))

    def _overrun(self, boundaries: BoundaryRows) -> FloatArray:
        """Bytes by which the worst device overruns its memory at its fullest moment, every layer at
        its least."""
        counts = [run.count for run in self.problem.runs]
        worst = np.full(len(boundaries), -np.inf)
        for device, moments in enumerate(self.solver.in_flight):
            need = np.full(len(boundaries), -float(self.problem.memory_bytes[device]))
            moment = max(moments, key=lambda ns: (sum(ns), ns))
            for virtual_stage, stage in enumerate(self.schedule.stages_of(device)):
                n = self.solver.of(moment, virtual_stage)
                first, end = boundaries[:, stage], boundaries[:, stage + 1]
                done = self._least_bytes(n, tuple(counts))
                need += done[end] - done[first] + n[0] * self.problem.resident_bytes[first]
            worst = np.maximum(worst, need)
        return worst

    def _least_bytes(self, in_flight: InFlight, counts: tuple[int, ...]) -> FloatArray:
        """Least bytes of the layers before each, with so many microbatches in flight."""
        if in_flight not in self._least:
            least = [
                float((x.layer.state_bytes + x.layer.kept_bytes(in_flight)).min())
                for x in self.problem.runs
            ]
            self._least[in_flight] = np.concatenate(([0.0], np.cumsum(np.repeat(least, counts))))
        return self._least[in_flight]

    def try_divisions(
        self, solver: VirtualStageSolver, shortlist: Sequence[tuple[int, ...]]
    ) -> bool:
        """Solves and simulates divisions that may be faster; whether one is the best so far."""
        found = [solver.stages(boundaries, self.step_s) for boundaries in shortlist]
        fitting = [stages for stages in found if stages is not None]
        if not fitting:
            return False
        steps_s = self._steps_s(fitting)
        best = int(np.argmin(steps_s))
        if np.isinf(self.first_step_s):
            self.first_step_s = float(steps_s[0])
        if steps_s[best] >= self.step_s:
            return False
        self.step_s, self._stages = float(steps_s[best]), fitting[best]
        self._layer_s = _layers_s(self.problem, self._stages)
        return True

    def _steps_s(self, pipelines: Sequence[Sequence[Stage]]) -> FloatArray:
        """Simulated seconds of a step of each."""
        names = "forward_s", "backward_s", "weight_s", "sync_s"
        seconds = np.array(
            [[[getattr(s, name) for s in stages] for stages in pipelines] for name in names]
        )
        boundaries = [[stage.first for stage in stages[1:]] for stages in pipelines]
        hop_s = np.array([self.problem.hop_s[at] for at in boundaries]).T
        return simulated_steps_s(self.schedule, seconds.swapaxes(1, 2), hop_s, self._waves)

    @cached_property
    def _waves(self) -> Waves | None:
        return waves_of(self.schedule)


def waves_of(schedule: Schedule) -> Waves | None:
    """What simulates split backwards; fused ones need none."""
    return Waves.of(schedule.actions()) if schedule.splits_backward else None


def simulated_steps_s(
    schedule: Schedule, seconds: FloatArray, hop_s: FloatArray, waves: Waves | None
) -> FloatArray:
    """Seconds of a step of n pipelines, shape (n,): every device's sync_s follows its last pass.
    seconds: forward_s, backward_s, weight_s and sync_s by stage, shape (4, stages, n); hop_s: by
    stage boundary, shape (stages - 1, n); waves: of the schedule."""
    forward_s, backward_s, weight_s, sync_s = seconds
    if waves is not None:
        crosses = [schedule.crosses_devices(s) for s in range(1, schedule.num_stages)]
        between_s = np.where(np.array(crosses)[:, None], hop_s, 0.0)
        ends_s = waves.ends_s(forward_s, backward_s - weight_s, weight_s, between_s)
    else:
        ends_s = interleaved_ends_s(schedule, forward_s, backward_s, hop_s)
    own = [list(schedule.stages_of(device)) for device in range(schedule.num_devices)]
    late_s = np.array([sync_s[stages].sum(axis=0) for stages in own])
    return np.asarray((ends_s + late_s).max(axis=0))


def even_times(problem: StageProblem, boundaries: IntArray) -> StageTimes:
    """Of stages whose layers are at their fastest."""
    fastest = [int(run.layer.total_s.argmin()) for run in problem.runs]
    each = [
        (x.forward_s[at], x.backward_s[at], x.weight_s[at])
        for x, at in zip((run.layer for run in problem.runs), fastest, strict=True)
    ]
    layers = np.repeat(np.array(each), [run.count for run in problem.runs], axis=0)
    forward_s, backward_s, weight_s = np.add.reduceat(layers, boundaries[:-1], axis=0).T
    hop_s = problem.hop_s[boundaries[1:-1]]
    return StageTimes.build(forward_s, backward_s, weight_s=weight_s, hop_s=hop_s)


def even_divisions(layer_s: FloatArray, num_stages: int) -> list[tuple[int, ...]]:
    """Boundaries of stages of like times, and of like numbers of layers; 0 and the number of layers
    are the outer ones."""
    num_layers, found = len(layer_s), []
    for each in (layer_s, np.ones(num_layers)):
        done = np.cumsum(each)
        boundaries = [0]
        for s in range(1, num_stages):
            at = int(np.abs(done - s / num_stages * done[-1]).argmin()) + 1
            boundaries.append(min(max(at, boundaries[-1] + 1), num_layers - (num_stages - s)))
        found.append((*boundaries, num_layers))
    return found


def _layers_s(problem: StageProblem, stages: Sequence[Stage]) -> FloatArray:
    """Seconds per microbatch of each layer as the stages run it."""
    seconds: list[float] = []
    for stage in stages:
        for block in stage.blocks:
            costs = problem.runs[block.run].layer
            at = costs.strategies.index(block.strategy)
            seconds += [float(costs.total_s[at])] * block.count
    return np.array(seconds)
