"""The best divisions under one schedule of one stage per device, and what is proven about them.

BoundarySearch.close runs these steps, BoundarySearch.branch the last one:

    1. bounds T_i[a, b] of every stage, one table per (in flight, budget)        (tables.py)
    2. the least D over all divisions is the lower bound; a division meets it    (bounds.py)
    3. solve the stages of that division exactly and simulate it: a plan         (try_boundaries)
    4. move single layers between stages, judged by D, then simulated            (moves.py)
    5. exact times have replaced their bounds, and stages no better plan has are dropped: repeat
       from 2 until bound and plan meet, or 2 finds no new division
    6. then split the set of divisions and bound each half, repeatedly
"""

import heapq
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from meshfold.cost_models.pipeline.schedules import Schedule, counted_in_flight
from meshfold.passes.run.hull import FloatArray
from meshfold.passes.stages.answer import PipelinePlan, Stage
from meshfold.passes.stages.bounds import Arcs, Bound, device_bounds_of, split, tighten
from meshfold.passes.stages.moves import judge_s, neighbours
from meshfold.passes.stages.paths import critical_path_bound_s
from meshfold.passes.stages.problem import Moments, StageProblem
from meshfold.passes.stages.solved import SolvedStage, step_ends_s
from meshfold.passes.stages.tables import StageTables

MAX_SETTLED_PASSES = 30_000
"""Passes simulated one by one, per schedule, to bound single divisions by their critical paths."""

SYNC_WEIGHTS = (0.0, 0.5, 2.0)
"""Other weights of sync_s tried on each stage of a division, 1 being that of a stage on its own."""

SYNC_GAIN = 0.01
"""Divisions above the best plan by more than this share of its step are not tried with them. Of 765
divisions of GPT 1T and Llama-3-405B other weights made one 0.8 % faster, the next 0.2 %."""

SHORTLIST_SIZE = 3
"""Neighbours of a division that are solved and simulated before it counts as the best around."""


class BoundarySearch:
    """The best plan under one schedule, and what is proven about it.

    bound_s: no plan under the schedule is faster. step_s: of the best plan, infinite before there
    is one; first_step_s: of the first.
    """

    def __init__(
        self, problem: StageProblem, schedule: Schedule, tables: StageTables, max_solved: int
    ) -> None:
        self.problem, self.schedule, self.tables = problem, schedule, tables
        self.step_s = self.first_step_s = float("inf")
        self.bound_s = 0.0
        self.capped = False
        self._device_bounds = device_bounds_of(problem, schedule)
        self._moments = counted_in_flight(schedule)
        self._kinds = list(zip(self._moments, problem.memory_bytes.tolist(), strict=True))
        tables.share(self._moments)
        self._max_solved = max_solved
        self._limit_s = float("inf")
        self._left: Bound | None = None
        self._settled_passes = 0
        self._seen: dict[tuple[int, ...], float] = {}
        self._boundaries: tuple[int, ...] = ()
        self._solved: list[SolvedStage] = []

    def bound_from(self, other: "BoundarySearch", limit_s: float) -> float:
        """A bound on this schedule from the tables of another with no more microbatches in flight
        on any device: its stages are never slower. 0 where that does not hold."""
        pairs = zip(other._moments, self._moments, strict=True)
        if not all(_is_within(theirs, ours) for theirs, ours in pairs):
            return 0.0
        found = tighten(self._device_bounds, other._all_arcs(limit_s), self.problem.hop_s, limit_s)
        return min(found.bound_s, other._beyond_s())

    def close(self, limit_s: float, tolerance: float) -> None:
        """Searches for plans faster than limit_s and raises the bound, as far as both go."""
        self._limit_s = limit_s
        arcs = self._all_arcs(limit_s)
        found = tighten(self._device_bounds, arcs, self.problem.hop_s, limit_s)
        while found.boundaries is not None and found.boundaries not in self._seen:
            self.try_boundaries(found.boundaries)
            self._local_search()
            limit = min(limit_s, self.step_s)
            if limit > self._beyond_s() and not self._is_wide:
                self.tables.widen()
                arcs = self._all_arcs(limit)
            found = self._tightened(arcs, limit)
            arcs = found.arcs
            self.bound_s = max(self.bound_s, min(found.bound_s, limit, self._beyond_s()))
            self.capped = self.tables.solver.num_solved >= self._max_solved
            if self.capped or limit <= self.bound_s * (1 + tolerance):
                break
        limit = min(limit_s, self.step_s)
        while found.boundaries is None and limit > self._beyond_s() and not self._is_wide:
            # All stages that the tables hold are too slow; what about larger ones?
            self.tables.widen()
            found = self._tightened(self._all_arcs(limit), limit)
        self.bound_s = max(self.bound_s, min(found.bound_s, limit, self._beyond_s()))
        self._left = found if found.boundaries is not None else None

    def branch(self, limit_s: float, tolerance: float, max_branches: int) -> None:
        """Splits the set of divisions by where the widest open boundary may lie, the subset of the
        lowest bound first: inside a subset the sums before and after a stage agree better."""
        if self._left is None or self.capped:
            return
        self._limit_s = limit_s
        front = [(max(self.bound_s, self._left.bound_s), 0, self._left)]
        settled_s = np.inf
        for number in range(1, max_branches // self.problem.num_devices + 2):
            limit = min(limit_s, self.step_s)
            if not front or limit <= front[0][0] * (1 + tolerance):
                break
            bound_s, _, branch = heapq.heappop(front)
            if branch.boundaries is not None and branch.boundaries not in self._seen:
                self.try_boundaries(branch.boundaries)
                self._local_search()
            sides = split(branch.arcs)
            if not sides:
                settled_s = min(settled_s, max(bound_s, self._settle(branch.boundaries)))
            for side, arcs in enumerate(sides):
                found = self._tightened(arcs, min(limit_s, self.step_s))
                if found.boundaries is not None:
                    entry = (max(bound_s, found.bound_s), 2 * number + side, found)
                    heapq.heappush(front, entry)
        left_s = front[0][0] if front else np.inf
        proven_s = min(left_s, settled_s, limit_s, self.step_s, self._beyond_s())
        self.bound_s = max(self.bound_s, proven_s)

    def _settle(self, boundaries: tuple[int, ...] | None) -> float:
        """A bound on all strategies of one division, 0 when there were enough of them."""
        num_passes = 2 * self.problem.num_devices * self.problem.num_microbatches
        if boundaries is None or self._settled_passes + num_passes > MAX_SETTLED_PASSES:
            return 0.0
        self._settled_passes += num_passes
        found = self._stages_of(boundaries)
        if len(found) < len(self._kinds):
            spans = zip(boundaries, boundaries[1:], self._kinds, strict=False)
            proven_s = (self.tables.solver.proven_s(a, b, *kind) for a, b, kind in spans)
            return np.inf if np.inf in proven_s else 0.0
        return critical_path_bound_s(self.problem, self.schedule, boundaries, found)

    def _stages_of(self, boundaries: tuple[int, ...]) -> list[SolvedStage]:
        """The solved stages of a division, without those that do not fit."""
        spans = zip(self._kinds, boundaries, boundaries[1:], strict=False)
        return [s for span in spans if (s := self.tables.solve(*span)) is not None]

    def _tightened(self, arcs: Sequence[Arcs], limit_s: float) -> Bound:
        """The bound along the arcs with all that exact stages have shown."""
        priced = [
            self.tables.priced(kind, of_device.start, of_device.end)
            for kind, of_device in zip(self._kinds, arcs, strict=True)
        ]
        return tighten(self._device_bounds, priced, self.problem.hop_s, limit_s)

    def plan(self, lower_s: float, capped: bool) -> PipelinePlan:
        """The best plan found."""
        spans = zip(self._boundaries, self._boundaries[1:], strict=False)
        triples = zip(spans, self._solved, self.schedule.in_flight, strict=True)
        stages = tuple(
            Stage(
                *span, s.blocks, s.forward_s, s.backward_s, s.weight_s, s.sync_s, n, s.memory_bytes
            )
            for span, s, n in triples
        )
        return PipelinePlan(
            self.problem.num_layers,
            self.schedule,
            stages,
            tuple(self.problem.memory_bytes.tolist()),
            self.step_s,
            self.first_step_s,
            lower_s,
            capped,
        )

    def _all_arcs(self, limit_s: float) -> tuple[Arcs, ...]:
        """Every stage each device may get in a plan faster than limit_s."""
        most_s = limit_s / self.problem.num_microbatches
        return tuple(self.tables.arcs(kind, i, most_s) for i, kind in enumerate(self._kinds))

    @property
    def _is_wide(self) -> bool:
        """Whether the tables hold stages of all layers."""
        return self.tables.width >= self.problem.num_layers

    def _beyond_s(self) -> float:
        """No plan with a stage of more layers than the tables hold is faster."""
        bounds = [
            self.tables.beyond_s(kind, None if i else 0) for i, kind in enumerate(self._kinds)
        ]
        return self.problem.num_microbatches * min(bounds)

    def try_boundaries(self, boundaries: tuple[int, ...]) -> bool:
        """Solves and simulates a division; whether it is the best so far."""
        found = self._stages_of(boundaries)
        self._seen[boundaries] = float("inf")
        if len(found) < len(self._kinds):
            return False
        found, step_s = self._with_sync_exposed(boundaries, found)
        self._seen[boundaries] = step_s
        if not self._solved:
            self.first_step_s = step_s
        if step_s >= self.step_s:
            return False
        self.step_s, self._boundaries, self._solved = step_s, boundaries, found
        return True

    def _with_sync_exposed(
        self, boundaries: tuple[int, ...], solved_stages: list[SolvedStage]
    ) -> tuple[list[SolvedStage], float]:
        """The solved stages, each replaced by one that weighs sync_s otherwise where that is
        faster, and the step: how much of sync_s is exposed shows only in the pipeline."""
        hop_s = self.problem.hop_s[list(boundaries[1:-1])]
        ends_s = step_ends_s(self.schedule, solved_stages, hop_s)
        step_s = float(ends_s.max())
        is_near = step_s < (1 + SYNC_GAIN) * min(self._limit_s, self.step_s)
        if not (self.tables.has_sync and is_near):
            return solved_stages, step_s
        for i in range(len(solved_stages)):
            for weight in SYNC_WEIGHTS:
                now = solved_stages[i]
                other = self.tables.solver.solve(
                    boundaries[i], boundaries[i + 1], *self._kinds[i], weight
                )
                if other is None or other == now or not _may_help(now, other, i, ends_s):
                    continue
                changed = [*solved_stages[:i], other, *solved_stages[i + 1 :]]
                changed_ends_s = step_ends_s(self.schedule, changed, hop_s)
                if (changed_s := float(changed_ends_s.max())) < step_s:
                    solved_stages, step_s, ends_s = changed, changed_s, changed_ends_s
        return solved_stages, step_s

    def _local_search(self) -> None:
        """Follows the best neighbour as long as one of the shortlist is an improvement."""
        improved = bool(self._solved) and self.schedule.num_devices > 1
        while improved:
            around = neighbours(self._boundaries)
            total_s = sum(solved.forward_s + solved.backward_s for solved in self._solved)
            forward_s = sum(solved.forward_s for solved in self._solved)
            share = forward_s / total_s if total_s else 0.5
            tables = [self.tables.table(kind) for kind in self._kinds]
            judged = judge_s(around, tables, self._device_bounds, share, self.problem.hop_s)
            order = np.argsort(judged, kind="stable")
            order = order[judged[order] < self.step_s]
            shortlist = [tuple(around[at].tolist()) for at in order[: 4 * SHORTLIST_SIZE]]
            fresh = [boundaries for boundaries in shortlist if boundaries not in self._seen][
                :SHORTLIST_SIZE
            ]
            improved = any(self.try_boundaries(boundaries) for boundaries in fresh)


def _is_within(theirs: Moments, ours: Moments) -> bool:
    """Whether at each of their moments one of ours has no fewer in flight."""
    return all(
        any(all(a <= b for a, b in zip_longest(x, y, fillvalue=0)) for y in ours) for x in theirs
    )


def _may_help(now: SolvedStage, other: SolvedStage, device: int, ends_s: FloatArray) -> bool:
    """Whether a stage instead of another on a device may make the step shorter: it has less to do
    per microbatch, or less at the end of the device that ends last."""
    if other.forward_s + other.backward_s < now.forward_s + now.backward_s:
        return bool(ends_s[device] - now.sync_s + other.sync_s < ends_s.max()) or (
            other.sync_s <= now.sync_s
        )
    return other.sync_s < now.sync_s and ends_s[device] >= ends_s.max()
