"""The best cuts under one schedule of one stage per device, and what is proven about them.

A part of stage_search, which says how the steps below go together (CutSearch.close):

    1. bounds T_i[a, b] of every stage, one table per (in flight, budget)        (stage_tables)
    2. the least D over all cuts is the lower bound; a cut that meets it         (stage_bounds)
    3. solve the stages of that cut exactly and simulate it: a plan              (try_cut)
    4. move single layers between stages, judged by D, then simulated            (stage_climb)
    5. exact times have replaced their bounds, and stages no better plan has are dropped: repeat
       from 2 until bound and plan meet, or 2 has no new cut
    6. then bound the halves of the cuts apart, again and again                  (branch)
"""

import heapq
from collections.abc import Sequence

import numpy as np

from meshfold.cost_models.pipeline.makespan import StageTimes, device_ends_s
from meshfold.cost_models.pipeline.schedules import Schedule
from meshfold.passes.run.hull import FloatArray
from meshfold.passes.stages.answer import PipelinePlan, Stage, StageSearchStats
from meshfold.passes.stages.bounds import Arcs, Bound, device_terms, split, tighten
from meshfold.passes.stages.moves import judge_s, neighbours
from meshfold.passes.stages.paths import cut_bound_s
from meshfold.passes.stages.problem import StageProblem
from meshfold.passes.stages.solved import Cell
from meshfold.passes.stages.tables import StageTables

MAX_SETTLED_PASSES = 30_000
"""Passes simulated one by one, per schedule, to bound single cuts by their critical paths."""

SYNC_WEIGHTS = (0.0, 0.5, 2.0)
"""Other weights of sync_s tried on each stage of a cut, 1 being that of a stage on its own."""

NUM_FINALISTS = 3
"""Neighbours of a cut that are solved and simulated before it counts as the best around."""


class CutSearch:
    """The best plan under one schedule, and what is proven about it.

    bound_s: no plan under the schedule is faster. step_s: of the best plan, infinite before there
    is one; first_step_s: of the first.
    """

    def __init__(
        self, problem: StageProblem, schedule: Schedule, tables: StageTables, max_cells: int
    ) -> None:
        self.problem, self.schedule, self.tables = problem, schedule, tables
        self.step_s = self.first_step_s = float("inf")
        self.bound_s = 0.0
        self.num_simulations = 0
        self.capped = False
        self._terms = device_terms(problem, schedule)
        self._kinds = list(zip(schedule.in_flight, problem.memory_bytes.tolist(), strict=True))
        self._max_cells = max_cells
        self._left: Bound | None = None
        self._settled_passes = 0
        self._seen: dict[tuple[int, ...], float] = {}
        self._cuts: tuple[int, ...] = ()
        self._cells: list[Cell] = []

    def bound_from(self, other: "CutSearch", limit_s: float) -> float:
        """A bound on this schedule from the tables of another that holds no more microbatches on
        any device: its stages are never slower. 0 where that does not hold."""
        pairs = zip(other.schedule.in_flight, self.schedule.in_flight, strict=True)
        if any(theirs > ours for theirs, ours in pairs):
            return 0.0
        found = tighten(self._terms, other._all_arcs(limit_s), self.problem.hop_s, limit_s)
        return min(found.bound_s, other._beyond_s())

    def close(self, limit_s: float, tolerance: float) -> None:
        """Searches for plans faster than limit_s and raises the bound, as far as both go."""
        arcs = self._all_arcs(limit_s)
        found = tighten(self._terms, arcs, self.problem.hop_s, limit_s)
        while found.cuts is not None and found.cuts not in self._seen:
            self.try_cut(found.cuts)
            self._climb()
            limit = min(limit_s, self.step_s)
            if limit > self._beyond_s() and self.tables.width < self.problem.num_layers:
                self.tables.widen()
                arcs = self._all_arcs(limit)
            found = self._tightened(arcs, limit)
            arcs = found.arcs
            self.bound_s = max(self.bound_s, min(found.bound_s, limit, self._beyond_s()))
            self.capped = self.tables.cells.num_solved >= self._max_cells
            if self.capped or limit <= self.bound_s * (1 + tolerance):
                return
        if found.cuts is None:
            self.bound_s = max(self.bound_s, min(limit_s, self.step_s, self._beyond_s()))
        else:
            self._left = found

    def branch(self, limit_s: float, tolerance: float, max_parts: int) -> None:
        """Splits the cuts left by where the widest open cut may lie, the part with the lowest bound
        first: inside a part the sums before and after a stage agree better with each other."""
        front = [] if self._left is None else [(self._left.bound_s, 0, self._left)]
        settled_s = np.inf
        for number in range(1, max_parts // self.problem.num_devices + 2):
            limit = min(limit_s, self.step_s)
            if not front or limit <= front[0][0] * (1 + tolerance):
                break
            bound_s, _, part = heapq.heappop(front)
            if part.cuts is not None and part.cuts not in self._seen:
                self.try_cut(part.cuts)
                self._climb()
            sides = split(part.arcs)
            if not sides:
                settled_s = min(settled_s, max(bound_s, self._settle(part.cuts)))
            for side, arcs in enumerate(sides):
                found = self._tightened(arcs, min(limit_s, self.step_s))
                if found.cuts is not None:
                    entry = (max(bound_s, found.bound_s), 2 * number + side, found)
                    heapq.heappush(front, entry)
        left_s = front[0][0] if front else np.inf
        proven_s = min(left_s, settled_s, limit_s, self.step_s, self._beyond_s())
        self.bound_s = max(self.bound_s, proven_s)

    def _settle(self, cuts: tuple[int, ...] | None) -> float:
        """A bound on all strategies of one cut, 0 when there were enough of them."""
        num_passes = 2 * self.problem.num_devices * self.problem.num_microbatches
        if cuts is None or self._settled_passes + num_passes > MAX_SETTLED_PASSES:
            return 0.0
        self._settled_passes += num_passes
        cells = [
            self.tables.solve(kind, first, end)
            for kind, first, end in zip(self._kinds, cuts, cuts[1:], strict=False)
        ]
        found = [cell for cell in cells if cell is not None]
        if len(found) < len(cells):
            return np.inf
        return cut_bound_s(self.problem, self.schedule, cuts, found)

    def _tightened(self, arcs: Sequence[Arcs], limit_s: float) -> Bound:
        """The bound along the arcs with all that exact stages have shown."""
        priced = [
            self.tables.priced(kind, part.start, part.end)
            for kind, part in zip(self._kinds, arcs, strict=True)
        ]
        return tighten(self._terms, priced, self.problem.hop_s, limit_s)

    def plan(self, lower_s: float, stats: StageSearchStats) -> PipelinePlan:
        """The best plan found."""
        stages = tuple(
            Stage(
                first,
                end,
                cell.blocks,
                cell.forward_s,
                cell.backward_s,
                cell.weight_s,
                cell.sync_s,
                in_flight,
                cell.memory_bytes,
            )
            for first, end, cell, in_flight in zip(
                self._cuts, self._cuts[1:], self._cells, self.schedule.in_flight, strict=False
            )
        )
        return PipelinePlan(
            self.problem.num_layers,
            self.schedule,
            stages,
            tuple(self.problem.memory_bytes.tolist()),
            self.step_s,
            self.first_step_s,
            lower_s,
            stats,
        )

    def _all_arcs(self, limit_s: float) -> tuple[Arcs, ...]:
        """Every stage each device may get in a plan faster than limit_s."""
        most_s = limit_s / self.problem.num_microbatches
        return tuple(self.tables.arcs(kind, i, most_s) for i, kind in enumerate(self._kinds))

    def _beyond_s(self) -> float:
        """No plan with a stage of more layers than the tables hold is faster."""
        bounds = [
            self.tables.beyond_s(kind, None if i else 0) for i, kind in enumerate(self._kinds)
        ]
        return self.problem.num_microbatches * min(bounds)

    def try_cut(self, cuts: tuple[int, ...]) -> bool:
        """Solves and simulates a cut; whether it is the best so far."""
        cells = [
            self.tables.solve(kind, first, end)
            for kind, first, end in zip(self._kinds, cuts, cuts[1:], strict=False)
        ]
        found = [cell for cell in cells if cell is not None]
        self._seen[cuts] = float("inf")
        if len(found) < len(cells):
            return False
        found, step_s = self._with_sync_exposed(cuts, found)
        self._seen[cuts] = step_s
        if not self._cells:
            self.first_step_s = step_s
        if step_s >= self.step_s:
            return False
        self.step_s, self._cuts, self._cells = step_s, cuts, found
        return True

    def _with_sync_exposed(
        self, cuts: tuple[int, ...], cells: list[Cell]
    ) -> tuple[list[Cell], float]:
        """The cells, each replaced by one that weighs sync_s otherwise where that is faster, and
        the step: how much of a stage's sync_s is exposed shows only in the whole pipeline."""
        hop_s = self.problem.hop_s[list(cuts[1:-1])]
        step_s = step_time_s(self.schedule, cells, hop_s)
        self.num_simulations += 1
        if not self.tables.has_sync:
            return cells, step_s
        for i in range(len(cells)):
            for weight in SYNC_WEIGHTS:
                other = self.tables.cells.solve(cuts[i], cuts[i + 1], *self._kinds[i], weight)
                if other is None or other == cells[i]:
                    continue
                changed = [*cells[:i], other, *cells[i + 1 :]]
                changed_s = step_time_s(self.schedule, changed, hop_s)
                self.num_simulations += 1
                if changed_s < step_s:
                    cells, step_s = changed, changed_s
        return cells, step_s

    def _climb(self) -> None:
        """Follows the best neighbour as long as one of the finalists is an improvement."""
        improved = bool(self._cells) and self.schedule.num_devices > 1
        while improved:
            around = neighbours(self._cuts)
            total_s = sum(cell.forward_s + cell.backward_s for cell in self._cells)
            forward_s = sum(cell.forward_s for cell in self._cells)
            share = forward_s / total_s if total_s else 0.5
            tables = [self.tables.table(kind) for kind in self._kinds]
            judged = judge_s(around, tables, self._terms, share, self.problem.hop_s)
            order = np.argsort(judged, kind="stable")
            order = order[judged[order] < self.step_s]
            finalists = [tuple(around[at].tolist()) for at in order[: 4 * NUM_FINALISTS]]
            fresh = [cuts for cuts in finalists if cuts not in self._seen][:NUM_FINALISTS]
            improved = any(self.try_cut(cuts) for cuts in fresh)


def step_time_s(schedule: Schedule, cells: Sequence[Cell], hop_s: FloatArray) -> float:
    """Simulated seconds of a step: every device's sync_s follows its last pass. hop_s: per cut."""
    times = StageTimes.build(
        [cell.forward_s for cell in cells],
        [cell.backward_s for cell in cells],
        weight_s=[cell.weight_s for cell in cells],
        hop_s=hop_s,
    )
    ends = device_ends_s(schedule, times)
    return float((ends + np.array([cell.sync_s for cell in cells])).max())
