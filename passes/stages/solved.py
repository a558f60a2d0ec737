"""Exact stages: the best strategies of the layers [a, b) under M, with as many microbatches in
flight as at one moment; those of several moments follow from these (StageSolver.solve).

The run level (passes/run/search.py) chooses how many layers take which strategy. Where transients
differ, the largest one a stage may have is tried from all that occur, in order of the
relaxations of ranges of them, until none left can win. Solved stages are made on demand, and
equal ones are solved once: a stage inside a run of equal layers is known by its number of layers.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshfold.cost_models.pipeline.makespan import StageTimes, device_ends_s
from meshfold.cost_models.pipeline.schedules import Schedule
from meshfold.passes.run.hull import FloatArray, IntArray, lp_values
from meshfold.passes.run.problem import (
    LayerType,
    NothingFaster,
    NothingFits,
    Run,
    RunPlan,
    RunProblem,
)
from meshfold.passes.run.search import NODE_CAP, solve_runs
from meshfold.passes.stages.answer import LayerBlock, Stage
from meshfold.passes.stages.problem import InFlight, LayerCosts, Moments, StageProblem


@dataclass(frozen=True)
class SolvedStage:
    """The best strategies of some layers."""

    blocks: tuple[LayerBlock, ...]
    forward_s: float
    backward_s: float
    weight_s: float
    sync_s: float
    memory_bytes: int
    objective_s: float
    """Seconds with a share of sync_s."""

    lower_s: float
    """What is proven of objective_s; less only where the run solver was capped."""


def stage_times(stages: Sequence[Stage | SolvedStage], hop_s: FloatArray) -> StageTimes:
    """The times of `stages`. hop_s: per stage boundary."""
    f, b, w = zip(*((s.forward_s, s.backward_s, s.weight_s) for s in stages), strict=True)
    return StageTimes.build(f, b, weight_s=w, hop_s=hop_s)


def step_ends_s(
    schedule: Schedule, stages: Sequence[Stage | SolvedStage], hop_s: FloatArray
) -> FloatArray:
    """Simulated seconds until each device ends: its sync_s follows its last pass."""
    ends_s = device_ends_s(schedule, stage_times(stages, hop_s))
    own = map(schedule.stages_of, range(schedule.num_devices))
    sync_s = [sum(stages[s].sync_s for s in numbers) for numbers in own]
    return np.asarray(ends_s + sync_s)


def summed_costs(
    layers: Iterable[tuple[LayerCosts, int, int]], in_flight: InFlight
) -> tuple[tuple[float, float, float, float], int, int]:
    """((forward_s, backward_s, weight_s, sync_s), bytes without transients, the largest transient)
    of layers: their costs, the number of the strategy, how many."""
    seconds = np.zeros(4)
    resident = transient = 0
    for costs, at, count in layers:
        tables = (costs.forward_s, costs.backward_s, costs.weight_s, costs.sync_s)
        seconds += count * np.array([table[at] for table in tables])
        each = int(costs.bytes_with(in_flight)[at])
        resident += count * each
        transient = max(transient, int(costs.transient_bytes[at]))
    forward_s, backward_s, weight_s, sync_s = seconds.tolist()
    return (forward_s, backward_s, weight_s, sync_s), resident, transient


class StageSolver:
    """Solves and keeps solved stages of one problem.

    objective: forward + backward + sync_s / num_microbatches. node_cap: as for solve_runs.
    """

    def __init__(self, problem: StageProblem, node_cap: int = NODE_CAP) -> None:
        self.problem, self.node_cap = problem, node_cap
        self.num_solved = 0
        self._known: dict[tuple[object, ...], SolvedStage | None] = {}
        self._placed: dict[tuple[object, ...], tuple[SolvedStage | None, float]] = {}
        """By what was asked: _known at its place in the chain."""
        self._costs = list(dict.fromkeys(run.layer for run in problem.runs))
        self._type_of_run = [self._costs.index(run.layer) for run in problem.runs]

    def objective_s(self, costs: LayerCosts, sync_weight: float = 1.0) -> FloatArray:
        """Seconds that a strategy costs per microbatch, its share of sync_s included."""
        return costs.total_s + sync_weight * costs.sync_s / self.problem.num_microbatches

    def solve(
        self, first: int, end: int, moments: Moments, budget_bytes: int, sync_weight: float = 1.0
    ) -> SolvedStage | None:
        """The best solved stage of the layers [first, end) that fits at all `moments`, or None
        where none is found (proven_s says whether there is one). sync_weight: 0 where the stage's
        sync_s is hidden behind the stages before it, above 1 where it is exposed most.

        One moment is solved exactly. Of several, what is the best at one and has room at the others
        is; else the fastest counts that is found to have room, and lower_s is the highest of the
        moments alone.
        """
        return self._known_at(first, end, moments, budget_bytes, sync_weight)[0]

    def proven_s(self, first: int, end: int, moments: Moments, budget_bytes: int) -> float:
        """No stage of these layers has a smaller objective; infinite where none fits."""
        return self._known_at(first, end, moments, budget_bytes, 1.0)[1]

    def _known_at(
        self, first: int, end: int, moments: Moments, budget_bytes: int, sync_weight: float
    ) -> tuple[SolvedStage | None, float]:
        asked = first, end, moments, budget_bytes, sync_weight
        if asked not in self._placed:
            self._placed[asked] = self._solve_all(*asked)
        return self._placed[asked]

    def _solve_all(
        self, first: int, end: int, moments: Moments, budget_bytes: int, sync_weight: float
    ) -> tuple[SolvedStage | None, float]:
        """(what `solve` returns, what is proven of it)."""
        lower_s, missing = 0.0, 0
        fitting: list[SolvedStage] = []
        fullest = self.problem.fullest(moments)
        for in_flight in (fullest, *(x for x in moments if x != fullest)):
            alone = self._solve(first, end, in_flight, budget_bytes, sync_weight)
            if alone is None:
                return None, np.inf
            lower_s = max(lower_s, alone.lower_s)
            everywhere = self._at_worst(alone, first, moments)
            if everywhere.memory_bytes <= budget_bytes:
                fitting.append(everywhere)
                if alone.lower_s == lower_s:
                    return everywhere, lower_s
            elif in_flight == fullest:
                missing = everywhere.memory_bytes - budget_bytes
        most = tuple(map(max, *moments))
        for in_flight, room in ((fullest, budget_bytes - missing), (most, budget_bytes)):
            if (safe := self._solve(first, end, in_flight, room, sync_weight)) is not None:
                everywhere = self._at_worst(safe, first, moments)
                fitting += [everywhere] if everywhere.memory_bytes <= budget_bytes else []
        best = min(fitting, key=lambda x: x.objective_s, default=None)
        return best and replace(best, lower_s=lower_s), lower_s

    def _at_worst(self, solved: SolvedStage, first: int, moments: Moments) -> SolvedStage:
        """`solved` with the memory of the moment at which it needs most."""
        if len(moments) == 1:
            return solved
        costs = [self.problem.runs[block.run].layer for block in solved.blocks]
        layers = [
            (x, x.strategies.index(block.strategy), block.count)
            for x, block in zip(costs, solved.blocks, strict=True)
        ]
        arrived_bytes = int(self.problem.resident_bytes[first])
        each = []
        for in_flight in moments:
            _, resident_bytes, transient_bytes = summed_costs(layers, in_flight)
            each.append(in_flight[0] * arrived_bytes + resident_bytes + transient_bytes)
        return replace(solved, memory_bytes=max(each))

    def _solve(
        self, first: int, end: int, in_flight: InFlight, budget_bytes: int, sync_weight: float
    ) -> SolvedStage | None:
        slices = self.problem.run_slices(first, end)
        resident_bytes = in_flight[0] * int(self.problem.resident_bytes[first])
        types = tuple((self._type_of_run[run], count) for run, count in slices)
        key = (types, in_flight, budget_bytes - resident_bytes, sync_weight)
        if key not in self._known:
            self.num_solved += 1
            self._known[key] = self._best(
                slices, in_flight, budget_bytes - resident_bytes, sync_weight
            )
        found = self._known[key]
        return found and _placed(found, slices, resident_bytes)

    def least_s(self, in_flight: InFlight, budget_bytes: int) -> float:
        """No stage of all layers has a smaller objective; nothing is asked about transients."""
        types = [
            (
                self.objective_s(run.layer),
                run.layer.bytes_with(in_flight),
                run.count,
            )
            for run in self.problem.runs
        ]
        return float(lp_values(types, budget_bytes))

    def _best(
        self,
        slices: tuple[tuple[int, int], ...],
        in_flight: InFlight,
        budget_bytes: int,
        sync_weight: float,
    ) -> SolvedStage | None:
        layers = [self.problem.runs[run].layer for run, _ in slices]
        transients = np.unique(np.concatenate([layer.transient_bytes for layer in layers]))
        asked = in_flight, budget_bytes, sync_weight
        # Ranges of the largest transient, the lowest bound first, in halves while that is not
        # above the best stage: few of the transients are ever looked at alone.
        queue = [(0.0, 0, len(transients))]
        best: SolvedStage | None = None
        lower_s = np.inf
        while queue and not (np.isinf(queue[0][0]) or best and queue[0][0] >= best.objective_s):
            _, at, end = heapq.heappop(queue)
            if end - at > 1:
                for half in ((at, (at + end) // 2), ((at + end) // 2, end)):
                    _, problem = self._within(slices, transients[slice(*half)], *asked)
                    bound_s = np.inf if problem is None else _relaxed_s(problem)
                    heapq.heappush(queue, (bound_s, *half))
                continue
            masks, problem = self._within(slices, transients[at:end], *asked)
            if problem is None:
                continue
            known_s = np.inf if best is None else best.objective_s
            plan = solve_runs(problem, node_cap=self.node_cap, incumbent_s=known_s)
            if isinstance(plan, NothingFits):
                continue
            if isinstance(plan, NothingFaster):
                lower_s = min(lower_s, plan.lower_s)
                continue
            solved = self._as_solved_stage(plan, slices, masks, in_flight)
            lower_s = min(lower_s, solved.lower_s)
            if best is None or solved.objective_s < best.objective_s:
                best = solved
        # A solver that was capped may have proven less of another threshold.
        return best and replace(best, lower_s=lower_s)

    def _within(
        self,
        slices: tuple[tuple[int, int], ...],
        transients: IntArray,
        in_flight: InFlight,
        budget_bytes: int,
        sync_weight: float,
    ) -> tuple[list[NDArray[np.bool_]], RunProblem | None]:
        """Strategies up to the largest of `transients`, with the room that the least of them
        leaves: no stage whose largest is one of them is better. None where a layer has none."""
        layers = [self.problem.runs[run].layer for run, _ in slices]
        masks = [layer.transient_bytes <= transients[-1] for layer in layers]
        if not all(mask.any() for mask in masks):
            return masks, None
        room = budget_bytes - int(transients[0])
        runs = []
        for (number, count), mask in zip(slices, masks, strict=True):
            costs = self.problem.runs[number].layer
            memory = costs.bytes_with(in_flight)
            names = tuple(name for name, ok in zip(costs.strategies, mask, strict=True) if ok)
            objective_s = self.objective_s(costs, sync_weight)[mask]
            runs.append(Run(LayerType(costs.name, names, objective_s, memory[mask]), count))
        return masks, RunProblem(tuple(runs), room)

    def _as_solved_stage(
        self,
        plan: RunPlan,
        slices: tuple[tuple[int, int], ...],
        masks: list[NDArray[np.bool_]],
        in_flight: InFlight,
    ) -> SolvedStage:
        blocks, layers = [], []
        for block in plan.blocks:
            costs = self.problem.runs[slices[block.run][0]].layer
            at = int(np.flatnonzero(masks[block.run])[block.strategy])
            blocks.append(LayerBlock(block.run, costs.name, block.name, block.count))
            layers.append((costs, at, block.count))
        seconds, resident_bytes, transient_bytes = summed_costs(layers, in_flight)
        return SolvedStage(
            tuple(blocks),
            *seconds,
            resident_bytes + transient_bytes,
            plan.time_s,
            plan.time_s / (1 + plan.gap),
        )


def _placed(
    solved: SolvedStage, slices: tuple[tuple[int, int], ...], resident_bytes: int
) -> SolvedStage:
    """`solved` with the run numbers of the chain and the resident bytes of its first layer."""
    blocks = tuple(replace(block, run=slices[block.run][0]) for block in solved.blocks)
    return replace(solved, blocks=blocks, memory_bytes=solved.memory_bytes + resident_bytes)


def _relaxed_s(problem: RunProblem) -> float:
    types = [(r.layer_type.time_s, r.layer_type.memory_bytes, r.count) for r in problem.runs]
    assert problem.budget_bytes is not None
    return float(lp_values(types, problem.budget_bytes))
