"""What it costs where two neighbours in a program differ in what tp does (strategy.TpMode).

The chain of runs (passes/one_pass/chain.py) prices a change of layout by a table. Two tables are
made:

    by boundary  layouts are (region, mode); an entry is what converting the values costs that
                 pass from an instance of one region to the next instance, of another. Exact, where
                 every value passes to the next instance and no other.
    by mode      layouts are modes; an entry is the dearest change that a region between others can
                 cause, per instance. For all other programs, and for those of many regions.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.op_graph import FoldedGraph, OpGraph, Source, SourceKind
from meshfold.ir.strategy import TP_MODES, RegionTyping, TpMode
from meshfold.passes.graph.reads import ProgramReads, program_reads
from meshfold.passes.price.conversions import conversion_cost
from meshfold.passes.price.step import crossing_s
from meshfold.passes.run.hull import FloatArray

Typings = Mapping[TpMode, Sequence[RegionTyping]]
"""One typing per region, by mode."""

MOST_REGIONS = 30
"""Above, boundaries are not told apart: the run search takes time cubic in the layouts."""


@dataclass(frozen=True, eq=False)
class ModeChanges:
    """modes: in a fixed order. table_s[a, b]: seconds where a layer of layout a is followed by one
    of layout b; by_region: whether regions have layouts of their own."""

    modes: tuple[TpMode, ...]
    table_s: FloatArray
    by_region: bool

    def layout(self, region: int, mode: TpMode) -> int:
        """The layout of a region's candidates of one mode, as `table_s` numbers them."""
        number = self.modes.index(mode)
        return region * len(self.modes) + number if self.by_region else number


def mode_changes(
    folded: FoldedGraph, typings: Typings, costs: CostModel, reads: ProgramReads | None = None
) -> ModeChanges:
    """The costs of mode changes: by region boundary where the batch may be on tp and values pass to
    neighbours alone, else by mode.
    reads: of `folded`, if at hand."""
    modes = tuple(mode for mode in TP_MODES if mode in typings)
    if "data" in modes and len(folded.regions) <= MOST_REGIONS and passes_on(folded):
        return ModeChanges(modes, _by_boundary(folded, modes, typings, costs), True)
    return ModeChanges(modes, _by_mode(folded, modes, typings, costs, reads), False)


def passes_on(folded: FoldedGraph) -> bool:
    """Whether every value goes from one instance to the next and no further."""
    return all(
        source.instance == k - 1
        for k, instance in enumerate(folded.instances)
        for source in instance.sources
        if source.kind is SourceKind.VALUE
    )


def _by_boundary(
    folded: FoldedGraph, modes: Sequence[TpMode], typings: Typings, costs: CostModel
) -> FloatArray:
    """Pairs that never meet get the sum of all that do: no detour over them is a bargain."""
    size = len(folded.regions) * len(modes)
    table = np.full((size, size), np.inf)
    np.fill_diagonal(table, 0.0)
    pairs = zip(folded.instances, folded.instances[1:], strict=False)
    for before, after in {(a.region, b.region): (a, b) for a, b in pairs}.values():
        graph = folded.regions[after.region].graph
        for m, left in enumerate(modes):
            for n, taken in enumerate(modes):
                at = before.region * len(modes) + m, after.region * len(modes) + n
                given, read = typings[left][before.region], typings[taken][after.region]
                table[at] = _workspace_s(graph, given, read, after.sources, costs)
    return np.where(np.isfinite(table), table, table[np.isfinite(table)].sum())


def _workspace_s(
    graph: OpGraph,
    given: RegionTyping,
    read: RegionTyping,
    sources: Sequence[Source],
    costs: CostModel,
) -> float:
    """Seconds of converting all that an instance of `graph` takes from the one before it."""
    total_s = 0.0
    for slot, source in enumerate(sources):
        if source.kind is SourceKind.VALUE:
            left, taken = given.outputs[source.output], read.slots[slot]
            if left != taken:
                cost = conversion_cost(graph.values[slot], left, taken, costs)
                total_s += cost.total_s
    return total_s


def _by_mode(
    folded: FoldedGraph,
    modes: Sequence[TpMode],
    typings: Typings,
    costs: CostModel,
    reads: ProgramReads | None,
) -> FloatArray:
    """The dearest over regions, both boundaries of one together: what goes to and from its
    instances is converted, while within one mode nothing is."""
    table = np.zeros((len(modes), len(modes)))
    if len(modes) < 2:
        return table
    counts = Counter(instance.region for instance in folded.instances)
    crossings = (reads or program_reads(folded)).count_crossings(folded)
    for (m, one), (n, others) in itertools.permutations(enumerate(modes), 2):
        changed_s = dict.fromkeys(counts, 0.0)
        for crossing, count in crossings.items():
            for r in {crossing.maker, crossing.reader}:
                making, reading = (
                    typings[one if end == r else others][end]
                    for end in (crossing.maker, crossing.reader)
                )
                changed_s[r] += count * crossing_s(folded, crossing, making, reading, costs)
        dearest_s = max(changed_s[r] / count for r, count in counts.items())
        table[m, n] = table[n, m] = max(table[m, n], dearest_s)
    return table
