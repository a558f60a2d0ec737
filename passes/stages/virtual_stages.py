"""Cuts of a chain for the interleaved schedule: p v stages, stage s on device s mod p.

A part of stage_search. The layers of a device are in v places, so the dynamic program over cuts of
one stage per device (stage_bounds) does not apply. Instead:

    1. a bound that holds for every cut                                    (stage_chunk_bounds)
    2. start from cuts of even times and of even numbers of layers
    3. move single layers between stages; all neighbours are judged by     (_judge_s)

           max over devices i and chunks r of   m W_i + sum_{j < i} t_(j,r)
                                                + p sum_{q < r} (t_(0,q) - t_(i,q))

       a path of passes: device 0 until F(r, 0), down to device i, there until B(r, m-1), and back;
       t_(j,r) is chunk r of device j, W_i the sum over its chunks
    4. the most promising ones are solved (stage_chunk_cells) and simulated together; repeat from 3
       as long as one is faster

Points 2 to 4 find a plan and prove nothing; what is proven is 1. Schedules of several chunks that
split the backward go the same way, judged by the busiest device and simulated event by event.
"""

from collections.abc import Sequence

import numpy as np

from meshfold.cost_models.pipeline.makespan import StageTimes, device_ends_s
from meshfold.cost_models.pipeline.schedules import Schedule
from meshfold.cost_models.pipeline.vector_makespan import interleaved_ends_s
from meshfold.passes.run.hull import FloatArray
from meshfold.passes.stages.answer import PipelinePlan, Stage, StageSearchStats
from meshfold.passes.stages.moves import Cuts, neighbours
from meshfold.passes.stages.problem import StageProblem
from meshfold.passes.stages.solved import RunSolver
from meshfold.passes.stages.virtual_stage_bounds import chunk_bound_s
from meshfold.passes.stages.virtual_stage_solver import ChunkCells

NUM_FINALISTS = 6
"""Neighbours of a cut that are solved and simulated before it counts as the best around."""

MAX_ROUNDS = 12
"""Moves of one layer after another; starts are close to even, so few are needed."""


class ChunkSearch:
    """The best plan under one interleaved schedule, and what is proven about it; attributes as of
    stage_cuts.CutSearch."""

    def __init__(self, problem: StageProblem, schedule: Schedule, solve_run: RunSolver) -> None:
        self.problem, self.schedule = problem, schedule
        self.step_s = self.first_step_s = float("inf")
        self.bound_s = chunk_bound_s(problem, schedule)
        self.num_simulations = 0
        self.capped = False
        self.cells = ChunkCells(problem, schedule, solve_run)
        self._stages: tuple[Stage, ...] = ()
        self._least: dict[int, FloatArray] = {}
        self._seen: set[tuple[int, ...]] = set()
        fastest = [float(run.layer.total_s.min()) for run in problem.runs]
        self._layer_s = np.repeat(fastest, [run.count for run in problem.runs])

    def close(self, limit_s: float, tolerance: float) -> None:
        """Looks for a plan unless none can be faster than limit_s by more than the tolerance."""
        if self.bound_s * (1 + tolerance) >= limit_s:
            return
        around = np.array([self._even_cuts(self._layer_s), self._even_cuts(None)])
        for _ in range(MAX_ROUNDS):
            ranked = [cuts for cuts in self._ranked(around) if cuts not in self._seen]
            if self._try(ranked[:NUM_FINALISTS]):
                center = tuple(stage.first for stage in self._stages)
            elif self._stages or not ranked:
                return
            else:
                center = ranked[0][:-1]
            around = neighbours((*center, self.problem.num_layers))

    def plan(self, lower_s: float, stats: StageSearchStats) -> PipelinePlan:
        """The best plan found."""
        return PipelinePlan(
            self.problem.num_layers,
            self.schedule,
            self._stages,
            tuple(self.problem.memory_bytes.tolist()),
            self.step_s,
            self.first_step_s,
            lower_s,
            stats,
        )

    def _even_cuts(self, layer_s: FloatArray | None) -> tuple[int, ...]:
        """Stages of like times, or of like numbers of layers."""
        num_layers, num_stages = self.problem.num_layers, self.schedule.num_stages
        done = np.cumsum(np.ones(num_layers) if layer_s is None else layer_s)
        cuts = [0]
        for s in range(1, num_stages):
            at = int(np.abs(done - s / num_stages * done[-1]).argmin()) + 1
            cuts.append(min(max(at, cuts[-1] + 1), num_layers - (num_stages - s)))
        return (*cuts, num_layers)

    def _ranked(self, cuts: Cuts) -> list[tuple[int, ...]]:
        """Cuts that fit first, then those that miss the least bytes; the fastest first."""
        missing = np.maximum(self._overrun(cuts), 0.0)
        order = np.lexsort((*cuts.T[::-1], self._judge_s(cuts), missing))
        return list(dict.fromkeys(tuple(cuts[at].tolist()) for at in order))

    def _judge_s(self, cuts: Cuts) -> FloatArray:
        """The paths of the module docstring, at the present times of the layers."""
        p, v, m = (
            self.schedule.num_devices,
            self.schedule.num_chunks,
            self.schedule.num_microbatches,
        )
        done = np.concatenate(([0.0], np.cumsum(self._layer_s)))
        each_s = np.diff(done[cuts], axis=1)
        if self.schedule.splits_backward:
            own = [list(self.schedule.stages_of(i)) for i in range(p)]
            return np.asarray(m * np.max([each_s[:, s].sum(axis=1) for s in own], axis=0))
        stage_s = each_s.reshape(-1, v, p)
        way_s = stage_s + 2 * self.problem.hop_s[cuts[:, 1:]].reshape(-1, v, p)
        way_s = np.cumsum(way_s, axis=2) - way_s
        swapped_s = np.cumsum(stage_s[:, :, :1] - stage_s, axis=1)
        swapped_s = np.concatenate((np.zeros_like(swapped_s[:, :1]), swapped_s[:, :-1]), axis=1)
        paths_s = m * stage_s.sum(axis=1, keepdims=True) + way_s + p * swapped_s
        return np.asarray(paths_s.max(axis=(1, 2)))

    def _overrun(self, cuts: Cuts) -> FloatArray:
        """Bytes by which the worst device overruns its memory at its fullest moment, every layer at
        its least."""
        counts = [run.count for run in self.problem.runs]
        worst = np.full(len(cuts), -np.inf)
        for device, moments in enumerate(self.cells.held):
            need = np.full(len(cuts), -float(self.problem.memory_bytes[device]))
            for chunk, n in enumerate(max(moments, key=lambda held: (sum(held), held))):
                stage = self.schedule.stages_of(device)[chunk]
                first, end = cuts[:, stage], cuts[:, stage + 1]
                done = self._least_bytes(n, tuple(counts))
                need += done[end] - done[first] + n * self.problem.held_bytes[first]
            worst = np.maximum(worst, need)
        return worst

    def _least_bytes(self, num_held: int, counts: tuple[int, ...]) -> FloatArray:
        """Of the layers before each, with so many microbatches held."""
        if num_held not in self._least:
            least = [
                float((x.layer.state_bytes + num_held * x.layer.activation_bytes).min())
                for x in self.problem.runs
            ]
            self._least[num_held] = np.concatenate(([0.0], np.cumsum(np.repeat(least, counts))))
        return self._least[num_held]

    def _try(self, finalists: Sequence[tuple[int, ...]]) -> bool:
        """Solves and simulates cuts; whether one is the best so far."""
        self._seen.update(finalists)
        found = [self.cells.stages(cuts) for cuts in finalists]
        fitting = [stages for stages in found if stages is not None]
        if not fitting:
            return False
        steps_s = chunk_steps_s(self.problem, self.schedule, fitting)
        self.num_simulations += len(fitting)
        best = int(np.argmin(steps_s))
        if np.isinf(self.first_step_s):
            self.first_step_s = float(steps_s[0])
        if steps_s[best] >= self.step_s:
            return False
        self.step_s, self._stages = float(steps_s[best]), fitting[best]
        self._layer_s = _layers_s(self.problem, self._stages)
        return True


def chunk_steps_s(
    problem: StageProblem, schedule: Schedule, pipelines: Sequence[Sequence[Stage]]
) -> FloatArray:
    """Simulated seconds of a step of each pipeline: every device's sync_s follows its last pass."""
    if schedule.splits_backward:
        return np.array([_step_s(problem, schedule, stages) for stages in pipelines])
    forward_s, backward_s, sync_s = (
        np.array([[getattr(stage, name) for stage in stages] for stages in pipelines]).T
        for name in ("forward_s", "backward_s", "sync_s")
    )
    hop_s = np.array([problem.hop_s[[s.first for s in stages[1:]]] for stages in pipelines]).T
    ends_s = interleaved_ends_s(schedule, forward_s, backward_s, hop_s)
    late_s = sync_s.reshape(schedule.num_chunks, schedule.num_devices, -1).sum(axis=0)
    return np.asarray((ends_s + late_s).max(axis=0))


def _step_s(problem: StageProblem, schedule: Schedule, stages: Sequence[Stage]) -> float:
    times = StageTimes.build(
        [stage.forward_s for stage in stages],
        [stage.backward_s for stage in stages],
        weight_s=[stage.weight_s for stage in stages],
        hop_s=problem.hop_s[[stage.first for stage in stages[1:]]],
    )
    ends_s = device_ends_s(schedule, times)
    late_s = [sum(stages[s].sync_s for s in schedule.stages_of(i)) for i in range(len(ends_s))]
    return float((ends_s + late_s).max())


def _layers_s(problem: StageProblem, stages: Sequence[Stage]) -> FloatArray:
    """Seconds per microbatch of each layer as the stages run it."""
    seconds: list[float] = []
    for stage in stages:
        for block in stage.blocks:
            costs = problem.runs[block.run].layer
            at = costs.strategies.index(block.strategy)
            seconds += [float(costs.total_s[at])] * block.count
    return np.array(seconds)
