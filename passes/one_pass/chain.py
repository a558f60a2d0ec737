"""The candidates of one mesh as a chain of runs, for the exact search of passes/run/search.py.

Peak memory is a maximum over moments, the chain needs sums over layers:

    estimate   fixed + sum_i (states_i + retained_i): what is resident when the backward starts; the
               workspace comes off the budget. What the search by it finds is mended where sum_i
               (states_i + gradients_i) is too much at the end of the backward, or with stepping_i
               while the optimizer steps (moment_limits.py)
    bound      what is resident in every program at several moments, fixed included (moments.py): of
               each alone, and of all together where more than one are short of memory
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.strategy import TP_MODES, TpMode
from meshfold.passes.one_pass.candidates import StrategyCandidate
from meshfold.passes.one_pass.mode_changes import ModeChanges
from meshfold.passes.one_pass.moment_limits import LayerChoices, counts_within, least_s
from meshfold.passes.one_pass.moments import (
    LayerBytes,
    Moment,
    Moments,
    SavedOutputs,
    bytes_after_backward,
    bytes_in_step,
    outputs_bytes,
    together,
)
from meshfold.passes.run.hull import FloatArray, lower_hull, sum_hulls
from meshfold.passes.run.problem import Block, LayerType, Run, RunPlan, RunProblem
from meshfold.passes.run.search import price_blocks, solve_runs

TIE = 1e-6
"""Share of StrategyCandidate.overlapped_s that the exact search adds, so that no layer recomputes
or offloads without need where communication or compute hides it."""

MOST_LIMITS = 64
"""Workspace limits that are tried for the smallest program."""

NODE_CAP = 5_000
"""Exchanges that one exact search looks at before it is content with the bound."""


class CandidateChain:
    """Candidates per region that may stand together, as a chain of runs.

    fixed_bytes: resident whatever is chosen. changes: seconds where two neighbours differ in mode.
    capacity_bytes: of a device, which the bound and the optimizer's step are held against.
    """

    def __init__(
        self,
        folded: FoldedGraph,
        candidates: Sequence[Sequence[StrategyCandidate]],
        fixed_bytes: int,
        changes: ModeChanges,
        capacity_bytes: int,
    ) -> None:
        self.fixed_bytes = fixed_bytes
        self.changes = changes
        self.saved_outputs = SavedOutputs(folded, candidates)
        self.everything = candidates
        self._has_modes = len({c.strategy.tp_mode for of in candidates for c in of}) > 1
        runs = folded.runs
        region, first, count = runs[0]
        # The first instance is a run of its own: only its gather and reduction are fully exposed.
        rest = [(region, first + 1, count - 1)] if count > 1 else []
        self.runs = [(region, first, 1), *rest, *runs[1:]]
        self.capacity_bytes = capacity_bytes
        self.moments = Moments(self.runs, self.saved_outputs)
        self.bound_s = self._bound_s()
        """No choice among all candidates that fits is faster. Infinite where nothing fits."""
        self.candidates = [self._worthwhile(r, of) for r, of in enumerate(candidates)]

    def smallest(self) -> list[list[StrategyCandidate]]:
        """Programs of least memory, per region a candidate: by what is resident in the backward,
        and when the optimizer steps, each with its least workspace."""
        found = [self._smallest(stepping) for stepping in (False, True)]
        return found if found[0] != found[1] else found[:1]

    def _smallest(self, with_stepping: bool) -> list[StrategyCandidate]:
        counts = [0] * len(self.candidates)
        for region, _, count in self.runs:
            counts[region] += count
        best: tuple[int, list[StrategyCandidate]] | None = None
        limits = sorted({c.workspace_bytes for of in self.candidates for c in of}, reverse=True)
        for workspace_bytes in limits[:: 1 + len(limits) // MOST_LIMITS]:
            chosen = []
            total = workspace_bytes
            for r, of in enumerate(self.candidates):
                options = [c for c in of if c.workspace_bytes <= workspace_bytes]
                if not options:
                    break
                needs = {c.name: self._estimate(c, r, with_stepping) for c in options}
                chosen.append(min(options, key=lambda c: (needs[c.name], c.name)))
                total += counts[r] * needs[chosen[-1].name]
            if len(chosen) == len(counts) and (best is None or total < best[0]):
                best = total, chosen
        assert best is not None, "under the largest limit every candidate is left"
        return best[1]

    def estimate_bytes(self, per_region: Sequence[StrategyCandidate]) -> int:
        """The estimate for a program in which all instances of a region take one candidate."""
        layers = (self._layer_bytes(per_region[r], r) * count for r, _, count in self.runs)
        return self.fixed_bytes + sum(layers)

    @property
    def least_workspace_bytes(self) -> int:
        """The workspace of the region that needs most, at its least."""
        return max(min(c.workspace_bytes for c in of) for of in self.candidates)

    def _bound_s(self) -> float:
        moments = self.moments.all()
        alone_s = [self._relaxed_s(moment, self.capacity_bytes) for moment in moments]
        bound_s = max(alone_s)
        # Above what takes no memory into account, more than one of them decide.
        free_s = self._relaxed_s(moments[0], math.inf)
        if math.isfinite(bound_s) and sum(s > free_s for s in alone_s) > 1:
            bound_s = max(bound_s, self._relaxed_together_s(moments))
        return bound_s

    def _relaxed_together_s(self, moments: Sequence[Moment]) -> float:
        """The relaxation in which all moments fit."""
        groups = []
        for (region, is_first, of), count in together(moments).items():
            candidates = self.everything[region]
            needs = [[layer_bytes(c, region) for c in candidates] for layer_bytes in of]
            groups.append(LayerChoices(count, _times(candidates, is_first), np.array(needs)))
        return least_s(groups, [self.capacity_bytes - self.fixed_bytes] * len(moments))

    def _relaxed_s(self, moment: Moment, budget_bytes: float) -> float:
        # Layers that recur in many runs are of one kind.
        counts: Counter[tuple[int, bool, LayerBytes]] = Counter()
        for region, is_first, count, layer_bytes in moment:
            counts[region, is_first, layer_bytes] += count
        hulls = []
        for region, is_first, layer_bytes in counts:
            candidates = self.everything[region]
            memory = np.array([layer_bytes(c, region) for c in candidates], dtype=np.int64)
            hulls.append(lower_hull(_times(candidates, is_first), memory))
        total = sum_hulls(hulls, list(counts.values()))
        return float(total.time_at_s(budget_bytes - self.fixed_bytes))

    @cached_property
    def unlimited(self) -> RunPlan:
        """The chain were memory unlimited."""
        found = self.solve(None)
        assert found is not None, "what is unlimited holds everything"
        return found

    def solve(self, budget_bytes: int | None, end_bytes: int | None = None) -> RunPlan | None:
        """The chain under a budget for the start of the backward; None: unlimited. Otherwise with
        at most end_bytes at its end and the capacity while the optimizer steps. None if nothing is
        found that fits."""
        conversion_s = self.changes.table_s if self._has_modes else None
        budget = None if budget_bytes is None else max(0, budget_bytes)
        problem = RunProblem(self._problem_runs, budget, self.fixed_bytes, conversion_s)
        found = solve_runs(problem, node_cap=NODE_CAP)
        if not isinstance(found, RunPlan):
            return None
        if budget is None:
            return found
        limits = budget, end_bytes or self.capacity_bytes, self.capacity_bytes
        needs = found.memory_bytes, self.end_bytes(found), self.step_bytes(found)
        if all(need <= limit for need, limit in zip(needs, limits, strict=True)):
            return found
        return self._within(found, problem, [limit - self.fixed_bytes for limit in limits])

    def _within(self, found: RunPlan, problem: RunProblem, limits: Sequence[int]) -> RunPlan | None:
        """The best plan within all limits that has the order of layouts of `found`; if there is
        none, of those with one layout."""
        order = [
            (*key, sum(block.count for block in blocks))
            for key, blocks in itertools.groupby(found.blocks, self._interchangeable)
        ]
        plan = self._in_order(found, order, problem, limits)
        if plan is not None or not self._has_modes:
            return plan
        modes = {c.strategy.tp_mode for of in self.candidates for c in of}
        orders = [[(k, mode, n) for k, (_, _, n) in enumerate(self.runs)] for mode in sorted(modes)]
        plans = [self._in_order(found, order, problem, limits) for order in orders]
        return min(filter(None, plans), key=lambda plan: plan.time_s, default=None)

    def _in_order(
        self,
        found: RunPlan,
        order: Sequence[tuple[int, TpMode, int]],
        problem: RunProblem,
        limits: Sequence[int],
    ) -> RunPlan | None:
        """`found` with other candidates; order: runs in parts of one layout, with their layers."""
        layers: Counter[tuple[int, bool, TpMode]] = Counter()
        tables: dict[tuple[int, bool, TpMode], LayerType] = {}
        for run, mode, count in order:
            layers[self.runs[run][0], run == 0, mode] += count
            tables[self.runs[run][0], run == 0, mode] = problem.runs[run].layer_type
        rows = {key: self._rows(key[0], key[2]) for key in layers}
        if not all(rows.values()):
            return None
        choices = [
            self._choices(key[0], rows[key], table, layers[key]) for key, table in tables.items()
        ]
        counts = counts_within(choices, limits)
        if counts is None:
            return None
        left = dict(zip(layers, counts, strict=True))
        blocks = []
        for run, mode, count in order:
            key = self.runs[run][0], run == 0, mode
            for k in np.flatnonzero(left[key]).tolist():
                taken = min(count, int(left[key][k]))
                left[key][k] -= taken
                count -= taken
                if taken:
                    row = rows[key][k]
                    blocks.append(Block(run, row, tables[key].strategies[row], taken))
        time_s, conversion_s, memory_bytes = price_blocks(problem, blocks)
        return replace(
            found,
            blocks=tuple(blocks),
            time_s=time_s,
            conversion_s=conversion_s,
            memory_bytes=memory_bytes,
        )

    def _rows(self, region: int, mode: TpMode) -> list[int]:
        """Candidates of a region in a layout."""
        of = enumerate(self.candidates[region])
        return [k for k, c in of if not self._has_modes or c.strategy.tp_mode == mode]

    def _choices(
        self, region: int, rows: Sequence[int], table: LayerType, count: int
    ) -> LayerChoices:
        """The candidates `rows` of a region at the start and the end of the backward, and while the
        optimizer steps."""
        of = [self.candidates[region][k] for k in rows]
        later = [[f(c, region) for c in of] for f in (bytes_after_backward, bytes_in_step)]
        needs = np.vstack([table.memory_bytes[list(rows)], np.array(later, np.int64)])
        return LayerChoices(count, table.time_s[list(rows)], needs)

    def end_bytes(self, found: RunPlan) -> int:
        """What a plan needs when the backward ends, but for what the last layer works with."""
        return self._bytes_of(found, bytes_after_backward)

    def step_bytes(self, found: RunPlan) -> int:
        """What a plan needs while the optimizer steps."""
        return self._bytes_of(found, bytes_in_step)

    def _bytes_of(self, found: RunPlan, layer_bytes: LayerBytes) -> int:
        total = self.fixed_bytes
        for block in found.blocks:
            region, _, _ = self.runs[block.run]
            total += block.count * layer_bytes(self.candidates[region][block.strategy], region)
        return total

    @cached_property
    def _problem_runs(self) -> tuple[Run, ...]:
        """The same under every budget."""
        firsts = [(region, k == 0, count) for k, (region, _, count) in enumerate(self.runs)]
        types = {(r, is_first): self._type(r, is_first) for r, is_first, _ in firsts}
        return tuple(Run(types[r, is_first], count) for r, is_first, count in firsts)

    def assignment(self, found: RunPlan) -> list[StrategyCandidate]:
        """The candidate of every instance. Layers of a run that retain less come first: fewer
        bytes are resident in the middle of the backward, when gradients are there."""
        out: list[StrategyCandidate] = []
        for (run, _), blocks in itertools.groupby(found.blocks, self._interchangeable):
            candidates = self.candidates[self.runs[run][0]]
            ordered = sorted(blocks, key=lambda b: (candidates[b.strategy].retained_bytes, b.name))
            for block in ordered:
                out += [candidates[block.strategy]] * block.count
        return out

    def _interchangeable(self, block: Block) -> tuple[int, TpMode]:
        """Blocks with the same key can trade layers: same run, same boundary layout."""
        candidate = self.candidates[self.runs[block.run][0]][block.strategy]
        return block.run, candidate.strategy.tp_mode

    def _type(self, region: int, is_first: bool) -> LayerType:
        candidates = self.candidates[region]
        needs = [self._layer_bytes(c, region) for c in candidates]
        layouts = [self.changes.layout(region, c.strategy.tp_mode) for c in candidates]
        return LayerType(
            name=f"region {region}" + (", first" if is_first else ""),
            strategies=tuple(c.name for c in candidates),
            time_s=_times(candidates, is_first)
            + TIE * np.array([c.overlapped_s for c in candidates]),
            memory_bytes=np.array(needs, dtype=np.int64),
            layouts=np.array(layouts) if self._has_modes else None,
        )

    def _worthwhile(
        self, region: int, candidates: Sequence[StrategyCandidate]
    ) -> list[StrategyCandidate]:
        """Candidates for the exact search: a partly sharded one only on the hull of its mode.
        Candidates between two others on one line would be as many equal plans."""
        found = []
        for mode in TP_MODES:
            of_mode = [c for c in candidates if c.strategy.tp_mode == mode]
            if not of_mode:
                continue
            vertices: set[int] = set()
            for layer_bytes in (self._layer_bytes, bytes_in_step):
                needs = np.array([layer_bytes(c, region) for c in of_mode], dtype=np.int64)
                vertices.update(lower_hull(_times(of_mode, False), needs).strategies.tolist())
            found += [x for k, x in enumerate(of_mode) if k in vertices or not x.is_partial]
        return found

    def _layer_bytes(self, candidate: StrategyCandidate, region: int) -> int:
        """What a layer adds to the estimate of the peak."""
        return candidate.states_bytes + self._retained_bytes(candidate, region)

    def _estimate(self, candidate: StrategyCandidate, region: int, with_stepping: bool) -> int:
        stepping = candidate.stepping_bytes if with_stepping else 0
        retained = self._retained_bytes(candidate, region)
        return candidate.states_bytes + max(retained, candidate.gradient_bytes + stepping)

    def _retained_bytes(self, candidate: StrategyCandidate, region: int) -> int:
        outputs = outputs_bytes(candidate, self.saved_outputs.ever[region])
        return candidate.retained_bytes + outputs


def _times(candidates: Sequence[StrategyCandidate], is_first: bool) -> FloatArray:
    return np.array([c.time_s + (c.ends_s if is_first else 0.0) for c in candidates])
