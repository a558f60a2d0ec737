"""A program of least memory, changed region by region by its exact figures.

Solutions of a chain are as good as its estimate of memory, a sum; the exact peak is a maximum over
moments. At the edge of what fits that decides: what the estimate calls larger may have the same
peak.
"""

from collections.abc import Callable, Mapping, Sequence

from meshfold.passes.leaf_costs import Leaf
from meshfold.passes.priced import Priced, order_of

Price = Callable[[Sequence[Leaf]], Priced]
"""Exact figures of the program that gives every region one leaf."""


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
    counts: Mapping[int, int],
    least: list[Leaf],
    best: Priced,
    price: Price,
) -> Priced:
    """The program of `least`, which fits, with leaves changed while it still fits and is faster,
    what gains most first, as far as MOST_CHANGES go. counts: instances of every region."""
    tried = 0
    while tried < MOST_CHANGES:
        gains = [
            (counts[region] * (least[region].time_s - leaf.time_s), region, k)
            for region, leaves in enumerate(choices)
            for k, leaf in enumerate(leaves)
        ]
        for gain_s, region, k in sorted(gains, key=lambda gain: (-gain[0], *gain[1:])):
            if gain_s <= 0 or tried == MOST_CHANGES:
                return best
            tried += 1
            other = [*least[:region], choices[region][k], *least[region + 1 :]]
            priced = price(other)
            if priced.memory.fits and order_of(priced) < order_of(best):
                least, best = other, priced
                break
    return best
