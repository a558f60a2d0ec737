"""Layout walks of a short chain of runs, the cheapest bound first.

A *walk* says for every run which layouts its layers use, in order: ((x,), (x, y), (y,)) for three
runs. With u of the relaxation (passes/run/chain.py) at one price, no plan on a walk costs less than

    sum over runs of  (n - visited) min u + sum of u over the visited  + conversions on the way,

since every layout on a walk is used by at least one layer (a plan that does not use one is found on
a shorter walk). `layout_walks` expands partial walks from a heap keyed by this bound for the runs
that are complete, and by one visit each for the run that is not, plus the exact rest A of the
relaxation: the first complete walk off the heap is the cheapest.
"""

import heapq
from collections.abc import Iterator

import numpy as np

from meshfold.passes.run.chain import Chain, Relaxation

Walk = tuple[tuple[int, ...], ...]
_Entry = tuple[float, Walk, float, bool]


def layout_walks(chain: Chain, relaxed: Relaxation) -> Iterator[tuple[float, Walk]]:
    """All walks with their lower bounds in seconds, by increasing bound.

    Never ends early by itself; stop once the bound reaches the best plan.
    """
    search = _WalkSearch(chain, relaxed)
    heap = [entry for layout in search.layouts_of(0) for entry in search.visit((), 0.0, layout)]
    heapq.heapify(heap)
    while heap:
        bound_s, walk, spent_s, is_left = heapq.heappop(heap)
        if is_left and len(walk) == len(chain.runs):
            yield bound_s, walk
            continue
        for entry in search.steps(walk, spent_s, is_left):
            heapq.heappush(heap, entry)


class _WalkSearch:
    """Successors of partial walks. An entry is (bound, walk, spent, whether its last run is left).

    spent: complete runs and all conversions so far, in seconds of time plus price * memory.
    """

    def __init__(self, chain: Chain, relaxed: Relaxation) -> None:
        self.chain, self.relaxed = chain, relaxed
        self.offset_s = relaxed.price * chain.budget_bytes

    def layouts_of(self, run: int) -> list[int]:
        """Layouts the run's type has strategies in."""
        return [int(x) for x in np.unique(self.chain.table(run).layouts)]

    def steps(self, walk: Walk, spent_s: float, is_left: bool) -> Iterator[_Entry]:
        """Steps to the first layout of the next run, or to one more layout of this run."""
        run = len(walk) - 1
        last = walk[run][-1]
        if is_left:
            for layout in self.layouts_of(run + 1):
                conversion_s = float(self.chain.conversion_s[last, layout])
                yield from self.visit(walk, spent_s + conversion_s, layout)
            return
        if len(walk[run]) == self.chain.count(run):
            return
        for layout in self.layouts_of(run):
            if layout not in walk[run]:
                conversion_s = float(self.chain.conversion_s[last, layout])
                longer = (*walk[:run], (*walk[run], layout))
                yield from self._entries(longer, spent_s + conversion_s)

    def visit(self, walk: Walk, spent_s: float, layout: int) -> Iterator[_Entry]:
        """Enters the next run in a layout."""
        yield from self._entries((*walk, (layout,)), spent_s)

    def _entries(self, walk: Walk, spent_s: float) -> Iterator[_Entry]:
        """The walk with its last run left here, and with that run still open."""
        run = len(walk) - 1
        best_s = self.relaxed.best_s[self.chain.kinds[self.chain.runs[run]][0]]
        visits_s = [float(best_s[layout]) for layout in walk[run]]
        others = self.chain.count(run) - len(visits_s)
        rest_s = float(self.relaxed.rest_s[run][walk[run][-1]]) - self.offset_s
        left_s = spent_s + sum(visits_s) + others * min(visits_s)
        yield left_s + rest_s, walk, left_s, True
        if others:
            open_s = spent_s + sum(visits_s) + others * float(best_s.min())
            yield open_s + rest_s, walk, spent_s, False
