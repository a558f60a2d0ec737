"""The leaves of one mesh as a chain of runs, for the exact search of passes/run_search.py.

Peak memory is a maximum over moments, the chain needs a sum over layers. Two are used:

    estimate   fixed + sum_i (states_i + max(kept_i, gradients_i)): what can be held at any moment
               of the backward at most; what passes by beside it comes off the budget. Where the
               bound says that the optimizer's step binds, gradients_i + stepping_i
    bound      what every program holds at three moments, fixed included: when the backward starts,
               sum_i (states_i + kept_i) with the inside of the layer that runs then; in the
               backward of the longest run's last layer; and sum_i (states_i + gradients_i +
               stepping_i) when the optimizer steps
"""

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from meshfold.ir.op_graph import FoldedGraph, SourceKind
from meshfold.ir.strategy import TP_MODES, TpMode
from meshfold.passes.one_pass.candidates import Leaf
from meshfold.passes.one_pass.mode_changes import ModeChanges
from meshfold.passes.run.hull import FloatArray, lower_hull, sum_hulls
from meshfold.passes.run.problem import Block, LayerType, NothingFits, Run, RunPlan, RunProblem
from meshfold.passes.run.search import solve_runs

Held = Callable[[Leaf, int], int]
"""Bytes that a layer of a region (its number) holds under a leaf."""

TIE = 1e-6
"""Share of Leaf.beside_s that the exact search adds: where recomputation hides behind
communication, or what is offloaded behind compute, a layer that need not do so does not."""

MOST_LIMITS = 64
"""Limits on what passes by that are tried for the smallest program."""

NODE_CAP = 5_000
"""Exchanges that one exact search looks at before it is content with the bound."""


class LeafChain:
    """Leaves per region that may stand together, as a chain of runs.

    fixed_bytes: held whatever is chosen. changes: seconds where two neighbours differ in mode.
    capacity_bytes: of a device, for the bound, which decides what moment the estimate is about.
    """

    def __init__(
        self,
        folded: FoldedGraph,
        leaves: Sequence[Sequence[Leaf]],
        fixed_bytes: int,
        changes: ModeChanges,
        capacity_bytes: int,
    ) -> None:
        self.fixed_bytes = fixed_bytes
        self.changes = changes
        self.kept = _KeptOutputs(folded, leaves)
        self.everything = leaves
        self._has_modes = len({leaf.strategy.tp_mode for of in leaves for leaf in of}) > 1
        runs = folded.runs
        region, first, count = runs[0]
        # The first instance is a run of its own: only its gather and reduction are exposed whole.
        rest = [(region, first + 1, count - 1)] if count > 1 else []
        self.runs = [(region, first, 1), *rest, *runs[1:]]
        stepping, *others = (self._relaxed_s(capacity_bytes, m) for m in self._moments())
        self.bound_s = max(stepping, *others)
        """No choice among all leaves that fits is faster: the linear relaxation with what every
        program holds at three moments, conversions free. Infinite where even that does not fit."""
        self._step_binds = stepping > max(others)
        self.leaves = [self._worthwhile(r, of) for r, of in enumerate(leaves)]

    def smallest(self) -> list[list[Leaf]]:
        """Programs, per region a leaf, one of which holds least: by what layers hold in the
        backward, and by what they hold when the optimizer steps, each with the least of what passes
        by in one."""
        found = [self._smallest(stepping) for stepping in (False, True)]
        return found if found[0] != found[1] else found[:1]

    def _smallest(self, with_stepping: bool) -> list[Leaf]:
        counts = [0] * len(self.leaves)
        for region, _, count in self.runs:
            counts[region] += count
        best: tuple[int, list[Leaf]] | None = None
        limits = sorted({leaf.passing_bytes for of in self.leaves for leaf in of}, reverse=True)
        for passing_bytes in limits[:: 1 + len(limits) // MOST_LIMITS]:
            chosen = []
            total = passing_bytes
            for r, of in enumerate(self.leaves):
                options = [leaf for leaf in of if leaf.passing_bytes <= passing_bytes]
                if not options:
                    break
                held = {leaf.name: self._estimate(leaf, r, with_stepping) for leaf in options}
                chosen.append(min(options, key=lambda leaf: (held[leaf.name], leaf.name)))
                total += counts[r] * held[chosen[-1].name]
            if len(chosen) == len(counts) and (best is None or total < best[0]):
                best = total, chosen
        assert best is not None, "the largest limit leaves every leaf"
        return best[1]

    def held_bytes(self, per_region: Sequence[Leaf]) -> int:
        """The estimate for a program in which all instances of a region take one leaf."""
        layers = (self._held(per_region[r], r) * count for r, _, count in self.runs)
        return self.fixed_bytes + sum(layers)

    @property
    def least_passing_bytes(self) -> int:
        """What passes by in any case: the region that needs most, at its least."""
        return max(min(leaf.passing_bytes for leaf in of_region) for of_region in self.leaves)

    def _moments(self) -> list[list[tuple[int, bool, int, Held]]]:
        """Per moment the runs as (region, is first, layers, what a layer holds): the optimizer's
        step, then the last layer of all and the last one of the longest run at their worst. What
        comes before a layer keeps its activations, what follows has given them for gradients."""
        longest = max(range(len(self.runs)), key=lambda k: self.runs[k][2])
        moments: list[list[tuple[int, bool, int, Held]]] = [
            [(r, k == 0, n, _held_in_step) for k, (r, _, n) in enumerate(self.runs)]
        ]
        for at, worst in ((len(self.runs) - 1, _held_at_worst), (longest, _held_in_backward)):
            runs: list[tuple[int, bool, int, Held]] = []
            for k, (r, _, n) in enumerate(self.runs):
                if k != at:
                    runs.append((r, k == 0, n, self._always_held if k < at else _held_after))
                    continue
                runs += [(r, k == 0, n - 1, self._always_held)] if n > 1 else []
                runs.append((r, k == 0, 1, worst))
            moments.append(runs)
        return moments

    def _relaxed_s(self, budget_bytes: int, moment: Sequence[tuple[int, bool, int, Held]]) -> float:
        hulls = []
        for region, is_first, _, held in moment:
            leaves = self.everything[region]
            memory = np.array([held(leaf, region) for leaf in leaves], dtype=np.int64)
            hulls.append(lower_hull(_times(leaves, is_first), memory))
        total = sum_hulls(hulls, [count for _, _, count, _ in moment])
        return float(total.time_at_s(budget_bytes - self.fixed_bytes))

    def solve(self, budget_bytes: int | None) -> RunPlan | None:
        """The chain under a budget (None: unlimited); None if nothing fits."""
        conversion_s = self.changes.table_s if self._has_modes else None
        budget = None if budget_bytes is None else max(0, budget_bytes)
        problem = RunProblem(self._problem_runs, budget, self.fixed_bytes, conversion_s)
        found = solve_runs(problem, node_cap=NODE_CAP)
        return None if isinstance(found, NothingFits) else found

    @cached_property
    def _problem_runs(self) -> tuple[Run, ...]:
        """The same under every budget."""
        firsts = [(region, k == 0, count) for k, (region, _, count) in enumerate(self.runs)]
        types = {(r, is_first): self._type(r, is_first) for r, is_first, _ in firsts}
        return tuple(Run(types[r, is_first], count) for r, is_first, count in firsts)

    def assignment(self, found: RunPlan) -> list[Leaf]:
        """The leaf of every instance. Layers of a run that keep less come first: fewer bytes are
        held in the middle of the backward, when gradients are already there."""
        out: list[Leaf] = []
        for (run, _), blocks in itertools.groupby(found.blocks, self._place):
            leaves = self.leaves[self.runs[run][0]]
            ordered = sorted(blocks, key=lambda b: (leaves[b.strategy].kept_bytes, b.name))
            for block in ordered:
                out += [leaves[block.strategy]] * block.count
        return out

    def _place(self, block: Block) -> tuple[int, TpMode]:
        """Blocks of one place can trade layers: same run, same boundary layout."""
        leaf = self.leaves[self.runs[block.run][0]][block.strategy]
        return block.run, leaf.strategy.tp_mode

    def _type(self, region: int, is_first: bool) -> LayerType:
        leaves = self.leaves[region]
        held = [self._held(leaf, region) for leaf in leaves]
        layouts = [self.changes.layout(region, leaf.strategy.tp_mode) for leaf in leaves]
        return LayerType(
            name=f"region {region}" + (", first" if is_first else ""),
            strategies=tuple(leaf.name for leaf in leaves),
            time_s=_times(leaves, is_first) + TIE * np.array([leaf.beside_s for leaf in leaves]),
            memory_bytes=np.array(held, dtype=np.int64),
            layouts=np.array(layouts) if self._has_modes else None,
        )

    def _worthwhile(self, region: int, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Leaves for the exact search: a partly sharded one only on the hull of its mode. Leaves
        between two others on one line would be as many equal plans."""
        kept = []
        for mode in TP_MODES:
            of_mode = [leaf for leaf in leaves if leaf.strategy.tp_mode == mode]
            if not of_mode:
                continue
            held = np.array([self._held(leaf, region) for leaf in of_mode], dtype=np.int64)
            vertices = set(lower_hull(_times(of_mode, False), held).strategies.tolist())
            kept += [x for k, x in enumerate(of_mode) if k in vertices or not x.is_partial]
        return kept

    def _held(self, leaf: Leaf, region: int) -> int:
        """What a layer adds to the estimate of the peak."""
        return self._estimate(leaf, region, self._step_binds)

    def _estimate(self, leaf: Leaf, region: int, with_stepping: bool) -> int:
        kept = leaf.kept_bytes + _outputs_bytes(leaf, self.kept.ever[region])
        stepping = leaf.stepping_bytes if with_stepping else 0
        return leaf.states_bytes + max(kept, leaf.gradient_bytes + stepping)

    def _always_held(self, leaf: Leaf, region: int) -> int:
        """What a layer holds in any program when the backward starts."""
        outputs = _outputs_bytes(leaf, self.kept.always[region])
        return leaf.states_bytes + leaf.kept_bytes + outputs


def _held_after(leaf: Leaf, region: int) -> int:
    """What a layer holds when its backward is done."""
    return leaf.states_bytes + leaf.gradient_bytes


def _held_in_step(leaf: Leaf, region: int) -> int:
    """What a layer holds while the optimizer steps."""
    return leaf.states_bytes + leaf.gradient_bytes + leaf.stepping_bytes


def _held_in_backward(leaf: Leaf, region: int) -> int:
    """What a layer holds in its own backward, its gathered parameters included."""
    return leaf.states_bytes + leaf.memory.backward_peak_bytes + leaf.gathered_bytes


def _held_at_worst(leaf: Leaf, region: int) -> int:
    """What the last layer of all holds in its forward or its backward: between them nothing of
    another layer goes."""
    inside = max(leaf.memory.forward_peak_bytes, leaf.memory.backward_peak_bytes)
    return leaf.states_bytes + inside + leaf.gathered_bytes


def _times(leaves: Sequence[Leaf], is_first: bool) -> FloatArray:
    return np.array([leaf.time_s + (leaf.ends_s if is_first else 0.0) for leaf in leaves])


class _KeptOutputs:
    """Per region the outputs that a consumer keeps for its backward: under some of its leaves
    (ever), under all of them (always). How large they are, the maker's leaf says."""

    def __init__(self, folded: FoldedGraph, leaves: Sequence[Sequence[Leaf]]) -> None:
        readers: dict[tuple[int, int], set[tuple[int, int]]] = {}
        for instance in folded.instances:
            for slot, source in enumerate(instance.sources):
                if source.kind is SourceKind.VALUE:
                    maker = folded.instances[source.instance].region
                    readers.setdefault((maker, source.output), set()).add((instance.region, slot))
        self.ever: list[list[int]] = [[] for _ in folded.regions]
        self.always: list[list[int]] = [[] for _ in folded.regions]
        for (maker, output), places in readers.items():
            keeps = [slot in leaf.memory.saved_slots for r, slot in places for leaf in leaves[r]]
            if any(keeps):
                self.ever[maker].append(output)
            if all(keeps):
                self.always[maker].append(output)


def _outputs_bytes(leaf: Leaf, outputs: Sequence[int]) -> int:
    return sum(leaf.memory.output_bytes[output] for output in outputs)
