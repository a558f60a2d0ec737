"""The candidates of one mesh as a chain of runs, for the exact search of passes/run/search.py.

Peak memory is a maximum over moments, the chain needs a sum over layers. Two are used:

    estimate   fixed + sum_i (states_i + max(retained_i, gradients_i)): the most that is resident at
               any moment of the backward; the workspace comes off the budget
    step       fixed + sum_i (states_i + gradients_i + stepping_i), when the optimizer steps: what
               the search by the estimate finds is mended where that is too much (step_limit.py)
    bound      what is resident in every program at three moments, fixed included: when the backward
               starts, sum_i (states_i + retained_i) with the inside of the layer that runs then; in
               the backward of the longest run's last layer; and when the optimizer steps. Where
               the last and another are short of memory, means of the two with weights, too: a
               program that fits in both moments fits there
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from meshfold.ir.op_graph import FoldedGraph, SourceKind
from meshfold.ir.strategy import TP_MODES, TpMode
from meshfold.passes.one_pass.candidates import StrategyCandidate
from meshfold.passes.one_pass.mode_changes import ModeChanges
from meshfold.passes.one_pass.step_limit import LayerChoices, counts_within
from meshfold.passes.run.hull import FloatArray, lower_hull, sum_hulls
from meshfold.passes.run.problem import Block, LayerType, Run, RunPlan, RunProblem
from meshfold.passes.run.search import price_blocks, solve_runs

LayerBytes = Callable[[StrategyCandidate, int], int]
"""Bytes that a layer of a region (its number) needs under a candidate."""

TIE = 1e-6
"""Share of StrategyCandidate.overlapped_s that the exact search adds, so that no layer recomputes
or offloads without need where communication or compute hides it."""

MOST_LIMITS = 64
"""Workspace limits that are tried for the smallest program."""

SHARES = 8
"""Weights of the mean of two moments go in steps of one of so many. Chosen: finer ones raise
bounds by less than a tenth of a percent."""

NODE_CAP = 5_000
"""Exchanges that one exact search looks at before it is content with the bound."""


class CandidateChain:
    """Candidates per region that may stand together, as a chain of runs.

    fixed_bytes: resident whatever is chosen. changes: seconds where two neighbours differ in mode.
    capacity_bytes: of a device, for the bound, which decides what moment the estimate is about.
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
        self.saved_outputs = _SavedOutputs(folded, candidates)
        self.everything = candidates
        self._has_modes = len({c.strategy.tp_mode for of in candidates for c in of}) > 1
        runs = folded.runs
        region, first, count = runs[0]
        # The first instance is a run of its own: only its gather and reduction are fully exposed.
        rest = [(region, first + 1, count - 1)] if count > 1 else []
        self.runs = [(region, first, 1), *rest, *runs[1:]]
        self.capacity_bytes = capacity_bytes
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

    def _moments(self) -> list[list[tuple[int, bool, int, LayerBytes]]]:
        """The runs at each moment as (region, is first, layers, bytes of a layer): the optimizer's
        step, then the last layer of all and the last one of the longest run at their worst. Layers
        before that one have their activations, layers after it their gradients."""
        longest = max(range(len(self.runs)), key=lambda k: self.runs[k][2])
        moments: list[list[tuple[int, bool, int, LayerBytes]]] = [
            [(r, k == 0, n, _bytes_in_step) for k, (r, _, n) in enumerate(self.runs)]
        ]
        for at, worst in ((len(self.runs) - 1, _worst_bytes), (longest, _bytes_in_backward)):
            runs: list[tuple[int, bool, int, LayerBytes]] = []
            for k, (r, _, n) in enumerate(self.runs):
                if k != at:
                    runs.append(
                        (
                            r,
                            k == 0,
                            n,
                            self._bytes_before_backward if k < at else _bytes_after_backward,
                        )
                    )
                    continue
                runs += [(r, k == 0, n - 1, self._bytes_before_backward)] if n > 1 else []
                runs.append((r, k == 0, 1, worst))
            moments.append(runs)
        return moments

    def _bound_s(self) -> float:
        step, *others = self._moments()
        step_s, *others_s = (self._relaxed_s(m) for m in (step, *others))
        bound_s = max(step_s, *others_s)
        free_s = self._relaxed_s(step, math.inf)
        for moment, moment_s in zip(others, others_s, strict=True):
            if free_s < min(step_s, moment_s) and math.isfinite(bound_s):
                means = (_mean_with_step(moment, share) for share in range(1, SHARES))
                bound_s = max(bound_s, *(self._relaxed_s(mean) for mean in means))
        return bound_s

    def _relaxed_s(
        self,
        moment: Sequence[tuple[int, bool, int, LayerBytes]],
        budget_bytes: float | None = None,
    ) -> float:
        """budget_bytes: None for the capacity."""
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
        budget_bytes = self.capacity_bytes if budget_bytes is None else budget_bytes
        return float(total.time_at_s(budget_bytes - self.fixed_bytes))

    @cached_property
    def unlimited(self) -> RunPlan:
        """The chain were memory unlimited."""
        found = self.solve(None)
        assert found is not None, "what is unlimited holds everything"
        return found

    def solve(self, budget_bytes: int | None) -> RunPlan | None:
        """The chain under a budget (None: unlimited); None if nothing fits."""
        conversion_s = self.changes.table_s if self._has_modes else None
        budget = None if budget_bytes is None else max(0, budget_bytes)
        problem = RunProblem(self._problem_runs, budget, self.fixed_bytes, conversion_s)
        found = solve_runs(problem, node_cap=NODE_CAP)
        if not isinstance(found, RunPlan):
            return None
        return found if problem.budget_bytes is None else self._with_step(found, problem)

    def _with_step(self, found: RunPlan, problem: RunProblem) -> RunPlan:
        """`found`, or where it needs more than the capacity while the optimizer steps, a plan with
        its order of layouts that does not, if there is one."""
        assert problem.budget_bytes is not None
        if self.step_bytes(found) <= self.capacity_bytes:
            return found
        groups, choices = [], []
        for (run, mode), blocks in itertools.groupby(found.blocks, self._interchangeable):
            of = self.candidates[self.runs[run][0]]
            rows = [
                k for k, c in enumerate(of) if not self._has_modes or c.strategy.tp_mode == mode
            ]
            table = problem.runs[run].layer_type
            groups.append((run, rows, table))
            choices.append(
                LayerChoices(
                    sum(block.count for block in blocks),
                    table.time_s[rows],
                    table.memory_bytes[rows],
                    np.array([_bytes_in_step(of[k], self.runs[run][0]) for k in rows]),
                )
            )
        counts = counts_within(
            choices,
            problem.budget_bytes - self.fixed_bytes,
            self.capacity_bytes - self.fixed_bytes,
        )
        if counts is None:
            return found
        blocks = tuple(
            Block(run, rows[k], table.strategies[rows[k]], int(column[k]))
            for (run, rows, table), column in zip(groups, counts, strict=True)
            for k in np.flatnonzero(column)
        )
        time_s, conversion_s, memory_bytes = price_blocks(problem, blocks)
        return replace(
            found,
            blocks=blocks,
            time_s=time_s,
            conversion_s=conversion_s,
            memory_bytes=memory_bytes,
        )

    def step_bytes(self, found: RunPlan) -> int:
        """What a plan needs while the optimizer steps."""
        total = self.fixed_bytes
        for block in found.blocks:
            region, _, _ = self.runs[block.run]
            total += block.count * _bytes_in_step(self.candidates[region][block.strategy], region)
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
            for layer_bytes in (self._layer_bytes, _bytes_in_step):
                needs = np.array([layer_bytes(c, region) for c in of_mode], dtype=np.int64)
                vertices.update(lower_hull(_times(of_mode, False), needs).strategies.tolist())
            found += [x for k, x in enumerate(of_mode) if k in vertices or not x.is_partial]
        return found

    def _layer_bytes(self, candidate: StrategyCandidate, region: int) -> int:
        """What a layer adds to the estimate of the peak."""
        return self._estimate(candidate, region, with_stepping=False)

    def _estimate(self, candidate: StrategyCandidate, region: int, with_stepping: bool) -> int:
        retained = candidate.retained_bytes + _outputs_bytes(
            candidate, self.saved_outputs.ever[region]
        )
        stepping = candidate.stepping_bytes if with_stepping else 0
        return candidate.states_bytes + max(retained, candidate.gradient_bytes + stepping)

    def _bytes_before_backward(self, candidate: StrategyCandidate, region: int) -> int:
        """What a layer needs in any program when the backward starts."""
        outputs = _outputs_bytes(candidate, self.saved_outputs.always[region])
        return candidate.states_bytes + candidate.retained_bytes + outputs


def _bytes_after_backward(candidate: StrategyCandidate, region: int) -> int:
    """What a layer needs when its backward is done."""
    return candidate.states_bytes + candidate.gradient_bytes


def _bytes_in_step(candidate: StrategyCandidate, region: int) -> int:
    """What a layer needs while the optimizer steps."""
    return candidate.states_bytes + candidate.gradient_bytes + candidate.stepping_bytes


def _bytes_in_backward(candidate: StrategyCandidate, region: int) -> int:
    """What a layer needs in its own backward, its gathered parameters included."""
    return candidate.states_bytes + candidate.memory.backward_peak_bytes + candidate.gathered_bytes


def _worst_bytes(candidate: StrategyCandidate, region: int) -> int:
    """What the last layer of all needs in its forward or its backward, which are adjacent."""
    inside = max(candidate.memory.forward_peak_bytes, candidate.memory.backward_peak_bytes)
    return candidate.states_bytes + inside + candidate.gathered_bytes


def _mean_with_step(
    moment: Sequence[tuple[int, bool, int, LayerBytes]], share: int
) -> list[tuple[int, bool, int, LayerBytes]]:
    """The mean of a moment and the optimizer's step, which has `share` of SHARES."""

    def mean(of: LayerBytes) -> LayerBytes:
        def layer_bytes(candidate: StrategyCandidate, region: int) -> int:
            step = _bytes_in_step(candidate, region)
            return (share * step + (SHARES - share) * of(candidate, region)) // SHARES

        return layer_bytes

    means = {of: mean(of) for *_, of in moment}
    return [(region, is_first, n, means[of]) for region, is_first, n, of in moment]


def _times(candidates: Sequence[StrategyCandidate], is_first: bool) -> FloatArray:
    return np.array([c.time_s + (c.ends_s if is_first else 0.0) for c in candidates])


class _SavedOutputs:
    """The outputs of each region that a consumer saves for its backward: under some of its
    candidates (ever); under all of them, and of every instance (always). The
    maker's candidate says how large they are."""

    def __init__(
        self, folded: FoldedGraph, candidates: Sequence[Sequence[StrategyCandidate]]
    ) -> None:
        readers: dict[tuple[int, int], set[tuple[int, int]]] = {}
        read: dict[tuple[int, int], set[int]] = {}
        num_instances = Counter(instance.region for instance in folded.instances)
        for instance in folded.instances:
            for slot, source in enumerate(instance.sources):
                if source.kind is SourceKind.VALUE:
                    maker = folded.instances[source.instance].region
                    readers.setdefault((maker, source.output), set()).add((instance.region, slot))
                    read.setdefault((maker, source.output), set()).add(source.instance)
        self.ever: list[list[int]] = [[] for _ in folded.regions]
        self.always: list[list[int]] = [[] for _ in folded.regions]
        for (maker, output), slots in readers.items():
            keeps = [slot in c.memory.saved_slots for r, slot in slots for c in candidates[r]]
            if any(keeps):
                self.ever[maker].append(output)
            if all(keeps) and len(read[maker, output]) == num_instances[maker]:
                self.always[maker].append(output)


def _outputs_bytes(candidate: StrategyCandidate, outputs: Sequence[int]) -> int:
    return sum(candidate.memory.output_bytes[output] for output in outputs)
