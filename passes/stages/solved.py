"""Exact stages: the best strategies of the layers [a, b) with k microbatches in flight under M.

The run level (run_search) chooses how many layers take which strategy. Where transients differ, the
largest one a stage may have is tried from all that occur, in order of their relaxations, until no
threshold left can win. Cells are made when asked for, and equal ones are solved once: a stage
inside a run of equal layers is known by its number of layers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshfold.passes.run.hull import FloatArray, lp_values
from meshfold.passes.run.problem import LayerType, NothingFits, Run, RunPlan, RunProblem
from meshfold.passes.stages.answer import LayerBlock
from meshfold.passes.stages.problem import LayerCosts, StageProblem

RunSolver = Callable[[RunProblem], RunPlan | NothingFits]
"""Exact solver of the run level; meshfold.passes.run.search.find_run_plan in planning."""


@dataclass(frozen=True)
class Cell:
    """The best strategies of some layers. objective_s: seconds with this share of sync_s, lower_s
    what is proven of it (less than objective_s only where the run solver was capped)."""

    blocks: tuple[LayerBlock, ...]
    forward_s: float
    backward_s: float
    weight_s: float
    sync_s: float
    memory_bytes: int
    objective_s: float
    lower_s: float


class StageCells:
    """Solves and keeps cells of one problem.

    objective: forward + backward + sync_s / num_microbatches.
    """

    def __init__(self, problem: StageProblem, solve_run: RunSolver) -> None:
        self.problem = problem
        self.num_solved = 0
        self.solve_run = solve_run
        self._known: dict[tuple[object, ...], Cell | None] = {}
        self._costs = list(dict.fromkeys(run.layer for run in problem.runs))
        self._type_of_run = [self._costs.index(run.layer) for run in problem.runs]

    def objective_s(self, costs: LayerCosts, sync_weight: float = 1.0) -> FloatArray:
        """Seconds that a strategy costs per microbatch, its share of sync_s included."""
        return costs.total_s + sync_weight * costs.sync_s / self.problem.num_microbatches

    def solve(
        self, first: int, end: int, in_flight: int, budget_bytes: int, sync_weight: float = 1.0
    ) -> Cell | None:
        """The best cell of the layers [first, end), or None when nothing fits. sync_weight: 0 where
        the stage's sync_s is hidden behind the stages before it, above 1 where it is exposed most.
        """
        pieces = self.problem.pieces(first, end)
        held_bytes = in_flight * int(self.problem.held_bytes[first])
        types = tuple((self._type_of_run[run], count) for run, count in pieces)
        key = (types, in_flight, budget_bytes - held_bytes, sync_weight)
        if key not in self._known:
            self.num_solved += 1
            self._known[key] = self._best(pieces, in_flight, budget_bytes - held_bytes, sync_weight)
        found = self._known[key]
        return found and _placed(found, pieces, held_bytes)

    def _best(
        self,
        pieces: tuple[tuple[int, int], ...],
        in_flight: int,
        budget_bytes: int,
        sync_weight: float,
    ) -> Cell | None:
        layers = [self.problem.runs[run].layer for run, _ in pieces]
        thresholds = np.unique(np.concatenate([layer.transient_bytes for layer in layers]))
        problems = []
        for threshold in thresholds.tolist():
            masks = [layer.transient_bytes <= threshold for layer in layers]
            if all(mask.any() for mask in masks):
                room = budget_bytes - threshold
                problem = self._run_problem(pieces, masks, in_flight, room, sync_weight)
                bound_s = _relaxed_s(problem) if len(thresholds) > 1 else 0.0
                problems.append((bound_s, threshold, masks, problem))
        best: Cell | None = None
        for bound_s, _, masks, problem in sorted(problems, key=lambda entry: entry[:2]):
            if best is not None and bound_s >= best.objective_s or np.isinf(bound_s):
                break
            plan = self.solve_run(problem)
            if isinstance(plan, NothingFits):
                continue
            cell = self._cell(plan, pieces, masks, in_flight)
            if best is None or cell.objective_s < best.objective_s:
                best = cell
        return best

    def _run_problem(
        self,
        pieces: tuple[tuple[int, int], ...],
        masks: list[NDArray[np.bool_]],
        in_flight: int,
        budget_bytes: int,
        sync_weight: float,
    ) -> RunProblem:
        runs = []
        for (number, count), mask in zip(pieces, masks, strict=True):
            costs = self.problem.runs[number].layer
            memory = costs.state_bytes + in_flight * costs.activation_bytes
            names = tuple(name for name, ok in zip(costs.strategies, mask, strict=True) if ok)
            layouts = None if self.problem.conversion_s is None else costs.layouts[mask]
            objective_s = self.objective_s(costs, sync_weight)[mask]
            runs.append(
                Run(LayerType(costs.name, names, objective_s, memory[mask], layouts), count)
            )
        return RunProblem(tuple(runs), budget_bytes, 0, self.problem.conversion_s)

    def _cell(
        self,
        plan: RunPlan,
        pieces: tuple[tuple[int, int], ...],
        masks: list[NDArray[np.bool_]],
        in_flight: int,
    ) -> Cell:
        blocks = []
        seconds = np.zeros(4)
        memory = transient = 0
        for block in plan.blocks:
            costs = self.problem.runs[pieces[block.run][0]].layer
            at = int(np.flatnonzero(masks[block.run])[block.strategy])
            blocks.append(LayerBlock(block.run, costs.name, block.name, block.count))
            tables = (costs.forward_s, costs.backward_s, costs.weight_s, costs.sync_s)
            seconds += block.count * np.array([table[at] for table in tables])
            each = costs.state_bytes[at] + in_flight * costs.activation_bytes[at]
            memory += block.count * int(each)
            transient = max(transient, int(costs.transient_bytes[at]))
        # The tables do not tell the two directions of a conversion apart: half each.
        forward_s, backward_s = (seconds[:2] + plan.conversion_s / 2).tolist()
        return Cell(
            tuple(blocks),
            forward_s,
            backward_s,
            weight_s=float(seconds[2]),
            sync_s=float(seconds[3]),
            memory_bytes=memory + transient,
            objective_s=plan.time_s,
            lower_s=plan.time_s / (1 + plan.gap),
        )


def _placed(cell: Cell, pieces: tuple[tuple[int, int], ...], held_bytes: int) -> Cell:
    """`cell` with the run numbers of the chain and the bytes held for its first layer."""
    blocks = tuple(replace(block, run=pieces[block.run][0]) for block in cell.blocks)
    return replace(cell, blocks=blocks, memory_bytes=cell.memory_bytes + held_bytes)


def _relaxed_s(problem: RunProblem) -> float:
    types = [(r.layer_type.time_s, r.layer_type.memory_bytes, r.count) for r in problem.runs]
    assert problem.budget_bytes is not None
    return float(lp_values(types, problem.budget_bytes))
