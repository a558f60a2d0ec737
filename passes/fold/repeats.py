"""Span a flat graph at tandem repeats of its sequence of ops, whatever modules called them.

For models whose code has no module per layer. Every op becomes a symbol (target, constants, shapes,
kinds of operands). With s the sequence of symbols, positions where s[k] == s[k + p] for p or more k
in a row are a repeat of period p. Then

    best(lo, hi)  = the repeat in ops lo..hi-1 that saves most ops, (count - 1) * p
    cuts(lo, hi)  = cuts(lo, start) + instances + cuts(stop, hi)

where instances are those next to each other whose canonical forms are equal, and the phase of the
repeat is where the fewest values cross. O(n^2 / 2) comparisons, vectorised; sequences of more than
MAX_OPS are left alone.
"""

import itertools

import numpy as np
import numpy.typing as npt

from meshfold.ir.op_graph import Arg, Ref
from meshfold.passes.fold.canonical_form import FlatIndex, Span, canonical_segment, is_worth

MIN_PERIOD = 10
"""Shorter repeats are tables being built (rotary frequencies), not layers."""

MAX_OPS = 20_000

MAX_TRIES = 50
"""Repeats of symbols to hold against canonical forms, those that save most first."""

Symbols = npt.NDArray[np.int64]


def repeat_spans(index: FlatIndex) -> list[Span]:
    """Cuts of the whole graph; a single one if nothing repeats."""
    num_ops = len(index.graph.ops)
    if num_ops > MAX_OPS:
        return [Span(0, num_ops, is_glue=True)]
    return _cuts(index, _symbols(index), 0, num_ops)


def _symbols(index: FlatIndex) -> Symbols:
    """One number per op: equal for ops that could be the same op of two instances."""
    numbers: dict[object, int] = {}
    graph = index.graph

    def shape_of(arg: Arg) -> object:
        if isinstance(arg, Ref):
            is_slot = arg.index < len(graph.slots)
            kind = graph.slots[arg.index].kind if is_slot else None
            return "value" if kind is None else kind, graph.values[arg.index]
        if isinstance(arg, tuple):
            return tuple(map(shape_of, arg))
        return "float" if isinstance(arg, float) else (type(arg).__name__, arg)

    symbols = []
    for op in graph.ops:
        args = (*op.args, *(value for _, value in op.kwargs))
        results = tuple(graph.values[v] for v in op.outputs)
        symbol = op.target, tuple(map(shape_of, args)), results
        symbols.append(numbers.setdefault(symbol, len(numbers)))
    return np.array(symbols, dtype=np.int64)


def _cuts(index: FlatIndex, symbols: Symbols, lo: int, hi: int) -> list[Span]:
    for start, period, count in _repeats(index, symbols, lo, hi)[:MAX_TRIES]:
        instances = _equal_instances(index, start, period, count)
        if len(instances) > 1 and is_worth(index, instances[0]):
            left = _cuts(index, symbols, lo, instances[0].start)
            right = _cuts(index, symbols, instances[-1].stop, hi)
            return [*left, *instances, *right]
    return [Span(lo, hi, is_glue=True)] if lo < hi else []


def _repeats(index: FlatIndex, symbols: Symbols, lo: int, hi: int) -> list[tuple[int, int, int]]:
    """(start, period, count) of repeats in ops lo..hi-1, those that save most ops first."""
    s = symbols[lo:hi]
    found = []
    for period in range(MIN_PERIOD, len(s) // 2 + 1):
        equal = s[:-period] == s[period:]
        if int(equal.sum()) < period:
            continue
        edges = np.flatnonzero(np.diff(np.concatenate(([0], equal.view(np.int8), [0]))))
        for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            count = (last - first) // period + 1
            if count > 1:
                slack = (last - first) % period
                found.append((lo + first, period, count, slack))
    # Of repeats that save the same, the shortest period: the others are multiples of it.
    found.sort(key=lambda f: (-(f[2] - 1) * f[1], f[1], f[0]))
    narrow = crossing(index)
    return [
        (min(range(first, first + slack + 1), key=narrow.__getitem__), period, count)
        for first, period, count, slack in found[:MAX_TRIES]
    ]


def crossing(index: FlatIndex) -> list[int]:
    """The number of values computed before each op and read by it or after it."""
    num_ops = len(index.graph.ops)
    change = [0] * (num_ops + 1)
    for k, op in enumerate(index.graph.ops):
        for value in op.outputs:
            last = min(index.last_use[value], num_ops - 1)
            if last > k:
                change[k + 1] += 1
                change[int(last) + 1] -= 1
    return list(itertools.accumulate(change))


def _equal_instances(index: FlatIndex, start: int, period: int, count: int) -> list[Span]:
    """The longest stretch of instances with one canonical form."""
    cuts = [Span(start + k * period, start + (k + 1) * period) for k in range(count)]
    forms = [canonical_segment(index, cut.start, cut.stop).form for cut in cuts]
    stretches = [list(group) for _, group in itertools.groupby(range(count), forms.__getitem__)]
    return [cuts[k] for k in max(stretches, key=len)]
