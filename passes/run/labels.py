"""Label search for chains of many different layers, pruned by regret.

One layer after the other; a label is a partial plan: (time, memory, layout it ends in). With A of
the relaxation (passes/run/chain.py) at its best price p, a label after layer i in layout x is
retained if

    time + p * (memory - budget) + A_i[x]  <  best known plan            (its bound)
    memory + least memory of the layers to come  <=  budget
    no label of the same layer and layout has less of both time and memory

(Irnich and Desaulniers 2005 for the method.) It is run twice: with few labels per layer and no
known plan, which finds a good plan fast, and then with that plan as the limit and many labels per
layer. If the second search never had to drop a label for want of room, the result is the optimum;
else it is the best plan found and says so. Time O(layers * layouts * labels * strategies).
"""

from dataclasses import dataclass

import numpy as np

from meshfold.passes.run.chain import Chain, ChainTable, Relaxation
from meshfold.passes.run.core import RELATIVE_TIE
from meshfold.passes.run.hull import FloatArray, IntArray, undominated

ROUNDING = 1e-9
"""Relative: more than sums over all layers are rounded by."""

FIRST_WIDTH = 64
"""Labels per layer of the search that finds the first plan."""


@dataclass(frozen=True, eq=False)
class LabelResult:
    """picks: for every layer the index into its run's table, () when no plan is below the limit.

    first_s: time of the first plan. labels: how many there were in all. capped: labels were
    dropped.
    """

    picks: tuple[int, ...]
    first_s: float
    labels: int
    capped: bool


@dataclass(frozen=True, eq=False)
class _Labels:
    """Kept labels of one layer: parallel arrays. parents: index into the labels before."""

    time_s: FloatArray
    memory_bytes: IntArray
    layouts: IntArray
    picks: IntArray
    parents: IntArray


def search_labels(chain: Chain, relaxed: Relaxation, width: int) -> LabelResult:
    """The fastest plan of a chain whose runs all have one layer. Its least memory must fit.

    width: most labels per layer.
    """
    # Where memory costs nothing, the walk of the relaxation is a plan: what is above it is not.
    limit_s = np.inf if relaxed.price else relaxed.dual_s * (1 + ROUNDING)
    first = _sweep(chain, relaxed, min(FIRST_WIDTH, width), limit_s)
    first_s = float(first[0][-1].time_s.min())
    limit_s = first_s * (1 - RELATIVE_TIE)
    if relaxed.dual_s >= limit_s:
        labels = sum(len(layer.time_s) for layer in first[0])
        return LabelResult(_read_back(first[0]), first_s, labels, False)
    layers, capped = _sweep(chain, relaxed, width, limit_s)
    labels = sum(len(layer.time_s) for layer in (*first[0], *layers))
    is_faster = len(layers[-1].time_s) > 0 and layers[-1].time_s.min() < first_s
    best = layers if is_faster else first[0]
    return LabelResult(_read_back(best), first_s, labels, capped)


def _sweep(
    chain: Chain, relaxed: Relaxation, width: int, limit_s: float
) -> tuple[list[_Labels], bool]:
    """Labels of every layer, shorter when none is left, and whether any had to be dropped."""
    least = np.array([chain.table(run).memory_bytes.min() for run in range(len(chain.runs))])
    least_after = np.concatenate((np.cumsum(least[::-1])[::-1][1:], [0]))
    zero = np.zeros(1, np.int64)
    labels = _Labels(np.zeros(1), zero, np.full(1, -1), zero, zero)
    layers: list[_Labels] = []
    capped = False
    for run in range(len(chain.runs)):
        room = chain.budget_bytes - int(least_after[run])
        rest_s = relaxed.rest_s[run] - relaxed.price * chain.budget_bytes
        labels = _extended(labels, chain.table(run), chain.conversion_s, room)
        bounds_s = labels.time_s + relaxed.price * labels.memory_bytes + rest_s[labels.layouts]
        labels, bounds_s = _selected(labels, bounds_s, np.flatnonzero(bounds_s < limit_s))
        if len(bounds_s) > width:
            capped = True
            labels, bounds_s = _selected(labels, bounds_s, _best_labels(labels, bounds_s, width))
        layers.append(labels)
        if not len(bounds_s):
            break
    return layers, capped


def _extended(
    labels: _Labels, table: ChainTable, conversion_s: FloatArray, room_bytes: int
) -> _Labels:
    """Every label with every strategy of the next layer that fits, undominated per layout."""
    columns = []
    for layout in np.unique(table.layouts).tolist():
        entered_s = labels.time_s
        if labels.layouts[0] >= 0:
            entered_s = entered_s + conversion_s[labels.layouts, layout]
        entering = undominated(entered_s, labels.memory_bytes)
        picks = np.flatnonzero(table.layouts == layout)
        times = (entered_s[entering, None] + table.time_s[picks]).ravel()
        memory = (labels.memory_bytes[entering, None] + table.memory_bytes[picks]).ravel()
        fits = np.flatnonzero(memory <= room_bytes)
        retained = fits[undominated(times[fits], memory[fits])]
        parents, chosen = entering[retained // len(picks)], picks[retained % len(picks)]
        layouts = np.full(len(retained), layout)
        columns.append((times[retained], memory[retained], layouts, chosen, parents))
    return _Labels(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def _selected(
    labels: _Labels, bounds_s: FloatArray, indices: IntArray
) -> tuple[_Labels, FloatArray]:
    chosen = _Labels(
        labels.time_s[indices],
        labels.memory_bytes[indices],
        labels.layouts[indices],
        labels.picks[indices],
        labels.parents[indices],
    )
    return chosen, bounds_s[indices]


def _best_labels(labels: _Labels, bounds_s: FloatArray, width: int) -> IntArray:
    """The labels of least bound, and the one of least memory, which can always be completed."""
    order = np.lexsort((labels.memory_bytes, bounds_s))[: width - 1]
    least = np.argmin(labels.memory_bytes)
    return np.unique(np.append(order, least))


def _read_back(layers: list[_Labels]) -> tuple[int, ...]:
    """The picks of the fastest label of the last layer; ties to the least memory."""
    last = layers[-1]
    index = int(np.lexsort((last.memory_bytes, last.time_s))[0])
    picks = []
    for layer in reversed(layers):
        picks.append(int(layer.picks[index]))
        index = int(layer.parents[index])
    return tuple(reversed(picks))
