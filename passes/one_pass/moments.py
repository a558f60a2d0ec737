"""Moments at which a program on one mesh needs memory, as sums over its layers.

Each is what any program with these candidates has there at least, for the bound of a chain
(chain.py); the exact peak is that of cost_models/memory/step_memory.py.

    step       while the optimizer steps: states, gradients, and what it makes
    end        the last layer of all at its worst, before it activations
    backward   the backward of a layer of the longest run: before it activations, gathered
               parameters of the next, behind it gradients, and buffers that a reduce-scatter still
               reads; of the last but one, and of the second
    reduction  the same layers when their gradients are there, in buckets
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate

from meshfold.ir.op_graph import FoldedGraph, SourceKind
from meshfold.passes.one_pass.candidates import StrategyCandidate

LayerBytes = Callable[[StrategyCandidate, int], int]
"""Bytes that a layer of a region (its number) needs under a candidate."""

MomentRun = tuple[int, bool, int, LayerBytes]
"""(region, whether it is the first run, layers, bytes of a layer)."""

Moment = list[MomentRun]
"""All layers at one moment."""


class SavedOutputs:
    """The outputs of each region that a consumer saves for its backward: under some of its
    candidates (ever); under all of them, and of every instance (always). The
    maker's candidate says how large they are. reach: how many instances behind each region the
    first reader of each of the latter is, at most."""

    def __init__(
        self, folded: FoldedGraph, candidates: Sequence[Sequence[StrategyCandidate]]
    ) -> None:
        readers: dict[tuple[int, int], set[tuple[int, int]]] = {}
        first_reader: dict[tuple[int, int], dict[int, int]] = {}
        num_instances = Counter(instance.region for instance in folded.instances)
        for at, instance in enumerate(folded.instances):
            for slot, source in enumerate(instance.sources):
                if source.kind is SourceKind.VALUE:
                    maker = folded.instances[source.instance].region
                    readers.setdefault((maker, source.output), set()).add((instance.region, slot))
                    first_reader.setdefault((maker, source.output), {}).setdefault(
                        source.instance, at
                    )
        self.ever: list[list[int]] = [[] for _ in folded.regions]
        self.always: list[list[int]] = [[] for _ in folded.regions]
        self.reach = [0] * len(folded.regions)
        for (maker, output), slots in readers.items():
            keeps = [slot in c.memory.saved_slots for r, slot in slots for c in candidates[r]]
            if any(keeps):
                self.ever[maker].append(output)
            first = first_reader[maker, output]
            if all(keeps) and len(first) == num_instances[maker]:
                self.always[maker].append(output)
                reach = max(reader - at for at, reader in first.items())
                self.reach[maker] = max(self.reach[maker], reach)


class Moments:
    """The moments of programs whose instances are `runs` of (region, first instance, layers)."""

    def __init__(self, runs: Sequence[tuple[int, int, int]], saved_outputs: SavedOutputs) -> None:
        self.runs = runs
        self.saved_outputs = saved_outputs
        self._longest = max(range(len(runs)), key=lambda k: runs[k][2])

    def all(self) -> list[Moment]:
        """The optimizer's step, then the others."""
        _, first, count = self.runs[self._longest]
        step: Moment = [(r, k == 0, n, bytes_in_step) for k, (r, _, n) in enumerate(self.runs)]
        others = [self._at(len(self.runs) - 1, self._last, _worst_bytes)]
        for at in sorted({first + min(1, count - 1), first + max(0, count - 2)}):
            others.append(self._at(self._longest, at, _bytes_in_backward))
            others.append(self._at(self._longest, at, _bytes_in_reduction))
        return [step, *others]

    @property
    def _last(self) -> int:
        _, first, count = self.runs[-1]
        return first + count - 1

    def _at(self, run: int, layer: int, worst: LayerBytes) -> Moment:
        """A moment inside of one layer (of `run`)."""
        # Values that the next layer makes are left out: they may be gone.
        reached = layer - 1
        found: Moment = []
        for k, (r, first, count) in enumerate(self.runs):
            before = min(count, max(0, layer - first))
            after = count - before - (k == run)
            with_values = min(before, max(0, reached - self.saved_outputs.reach[r] - first + 1))
            without = before - with_values
            # Neighbours of the same run. The last of all may be at its worst in its forward, when
            # nothing is gathered for the one before it.
            is_next = int(k == run and without > 0 and worst is not _worst_bytes)
            is_behind = int(k == run and after > 0)
            parts: list[tuple[int, LayerBytes]] = [
                (with_values, self._bytes_before_backward),
                (without - is_next, _bytes_inside),
                (is_next, _bytes_of_next),
                (int(k == run), worst),
                (is_behind, _bytes_just_behind),
                (after - is_behind, bytes_after_backward),
            ]
            found += [(r, k == 0, n, layer_bytes) for n, layer_bytes in parts if n]
        return found

    def _bytes_before_backward(self, candidate: StrategyCandidate, region: int) -> int:
        """What a layer needs in any program when the backward starts."""
        outputs = outputs_bytes(candidate, self.saved_outputs.always[region])
        return _bytes_inside(candidate, region) + outputs


def bytes_in_step(candidate: StrategyCandidate, region: int) -> int:
    """What a layer needs while the optimizer steps."""
    return candidate.states_bytes + candidate.gradient_bytes + candidate.stepping_bytes


def outputs_bytes(candidate: StrategyCandidate, outputs: Sequence[int]) -> int:
    """Of outputs that consumers save."""
    return sum(candidate.memory.output_bytes[output] for output in outputs)


def together(moments: Sequence[Moment]) -> Counter[tuple[int, bool, tuple[LayerBytes, ...]]]:
    """Layers by (region, whether they are the first run, their bytes at every moment)."""
    ends = [list(accumulate(n for _, _, n, _ in moment)) for moment in moments]
    found: Counter[tuple[int, bool, tuple[LayerBytes, ...]]] = Counter()
    begin = 0
    for end in sorted(set().union(*ends)):
        runs = [m[bisect_right(of, begin)] for m, of in zip(moments, ends, strict=True)]
        region, is_first, _, _ = runs[0]
        found[region, is_first, tuple(run[3] for run in runs)] += end - begin
        begin = end
    return found


def _bytes_inside(candidate: StrategyCandidate, region: int) -> int:
    """What a layer needs between its forward and its backward, without its outputs."""
    return candidate.states_bytes + candidate.retained_bytes


def _bytes_of_next(candidate: StrategyCandidate, region: int) -> int:
    """What the layer needs whose backward is next: its parameters are gathered already."""
    is_again = candidate.typing.reshard_after_forward
    return _bytes_inside(candidate, region) + candidate.gathered_bytes * is_again


def _bytes_just_behind(candidate: StrategyCandidate, region: int) -> int:
    """What the layer needs whose backward was the last one: its buckets are being reduced."""
    return bytes_after_backward(candidate, region) + candidate.in_flight_bytes


def bytes_after_backward(candidate: StrategyCandidate, region: int) -> int:
    """What a layer needs when its backward is done."""
    return candidate.states_bytes + candidate.gradient_bytes


def _bytes_in_backward(candidate: StrategyCandidate, region: int) -> int:
    """What a layer needs in its own backward, its gathered parameters included."""
    return candidate.states_bytes + candidate.memory.backward_peak_bytes + candidate.gathered_bytes


def _bytes_in_reduction(candidate: StrategyCandidate, region: int) -> int:
    """What a layer needs when its gradients are there, and in buckets."""
    return candidate.states_bytes + candidate.memory.reduction_bytes + candidate.reducing_bytes


def _worst_bytes(candidate: StrategyCandidate, region: int) -> int:
    """What the last layer of all needs in its forward or its backward, which are adjacent."""
    inside = max(candidate.memory.forward_peak_bytes, candidate.memory.backward_peak_bytes)
    return candidate.states_bytes + inside + candidate.gathered_bytes
