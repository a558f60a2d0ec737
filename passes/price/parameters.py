"""A program of least memory, changed leaf by leaf by its exact figures.

Solutions of a chain are as good as its estimate of memory, a sum; the exact peak is a maximum over
moments. At the edge of what fits that decides: what the estimate calls larger may have the same
peak.
"""

from collections.abc import Callable, Hashable, Sequence

from meshfold.passes.one_pass.candidates import Leaf
from meshfold.passes.one_pass.priced import Priced, order_of

Price = Callable[[Sequence[Leaf]], Priced]
"""Exact figures of the program with a leaf for every region, or for every instance."""


MOST_CHANGES = 256
"""Programs priced to make one faster: a model whose layers all differ has thousands to try."""


def made_smaller(
    choices: Sequence[Sequence[Leaf]], least: list[Leaf], best: Priced, price: Price
) -> tuple[list[Leaf], Priced]:
    """`least` with leaves changed while that makes its peak smaller, until it fits. choices: leaves
    per region; best: the figures of `least`."""
    for region, leaves in enumerate(choices):
        for leaf in leaves:
            if best.memory.fits:
                return least, best
            other = [*least[:region], leaf, *least[region + 1 :]]
            priced = price(other)
            if priced.memory.peak < best.memory.peak:
                least, best = other, priced
    return least, best


def made_faster(
    choices: Sequence[Sequence[Leaf]],
    regions: Sequence[int],
    best: Priced,
    assignment: Sequence[Leaf],
    price: Price,
) -> Priced:
    """The program of `assignment`, which fits, with leaves changed while it still fits and is
    faster, what gains most first, as far as MOST_CHANGES go. Of instances of a region under one
    leaf all change, or the first, or the last. regions: of every instance; choices: leaves per
    region; best: the figures of `assignment`."""
    now, tried = list(assignment), 0
    while tried < MOST_CHANGES:
        before = best
        for gain_s, where, leaf in _gains(choices, regions, now):
            if gain_s <= 0 or tried == MOST_CHANGES:
                return best
            tried += 1
            other = list(now)
            for instance in where:
                other[instance] = leaf
            priced = price(other)
            if priced.memory.fits and order_of(priced) < order_of(best):
                now, best = other, priced
                break
        if best is before:
            return best
    return best


def _gains(
    choices: Sequence[Sequence[Leaf]], regions: Sequence[int], now: Sequence[Leaf]
) -> list[tuple[float, tuple[int, ...], Leaf]]:
    """(seconds, instances, their new leaf), what gains most first."""
    alike: dict[tuple[int, Hashable], list[int]] = {}
    for instance, (region, leaf) in enumerate(zip(regions, now, strict=True)):
        alike.setdefault((region, leaf.key), []).append(instance)
    found = [
        (len(where) * (now[where[0]].time_s - leaf.time_s), where, leaf)
        for (region, _), of in alike.items()
        for where in dict.fromkeys((tuple(of), (of[0],), (of[-1],)))
        for leaf in choices[region]
    ]
    return sorted(found, key=lambda gain: -gain[0])
