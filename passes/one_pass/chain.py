"""The candidates of one mesh as a chain of runs, for the exact search of passes/run/search.py.

Peak memory is a maximum over moments, the chain needs a sum over layers. Two are used:

    estimate   fixed + sum_i (states_i + max(retained_i, gradients_i)): the most that is resident at
               any moment of the backward; the workspace comes off the budget. Where the bound says
               that the optimizer's step binds, gradients_i + stepping_i
    bound      what is resident in every program at three moments, fixed included: when the backward
               starts, sum_i (states_i + retained_i) with the inside of the layer that runs then; in
               the backward of the longest run's last layer; and sum_i (states_i + gradients_i +
               stepping_i) when the optimizer steps
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from meshfold.ir.op_graph import FoldedGraph, SourceKind
from meshfold.ir.strategy import TP_MODES, TpMode
from meshfold.passes.one_pass.candidates import StrategyCandidate
from meshfold.passes.one_pass.mode_changes import ModeChanges
from meshfold.passes.run.hull import FloatArray, lower_hull, sum_hulls
from meshfold.passes.run.problem import Block, LayerType, Run, RunPlan, RunProblem
from meshfold.passes.run.search import solve_runs

LayerBytes = Callable[[StrategyCandidate, int], int]
"""Bytes that a layer of a region (its number) needs under a candidate."""

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
        stepping, *others = (self._relaxed_s(capacity_bytes, m) for m in self._moments())
        self.bound_s = max(stepping, *others)
        """No choice among all candidates that fits is faster. Infinite where nothing fits."""
        self._step_binds = stepping > max(others)
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

    def _relaxed_s(
        self, budget_bytes: int, moment: Sequence[tuple[int, bool, int, LayerBytes]]
    ) -> float:
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

    def solve(self, budget_bytes: int | None) -> RunPlan | None:
        """The chain under a budget (None: unlimited); None if nothing fits."""
        conversion_s = self.changes.table_s if self._has_modes else None
        budget = None if budget_bytes is None else max(0, budget_bytes)
        problem = RunProblem(self._problem_runs, budget, self.fixed_bytes, conversion_s)
        found = solve_runs(problem, node_cap=NODE_CAP)
        return found if isinstance(found, RunPlan) else None

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
            needs = np.array([self._layer_bytes(c, region) for c in of_mode], dtype=np.int64)
            vertices = set(lower_hull(_times(of_mode, False), needs).strategies.tolist())
            found += [x for k, x in enumerate(of_mode) if k in vertices or not x.is_partial]
        return found

    def _layer_bytes(self, candidate: StrategyCandidate, region: int) -> int:
        """What a layer adds to the estimate of the peak."""
        return self._estimate(candidate, region, self._step_binds)

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
