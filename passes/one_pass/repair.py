"""A program of least memory, changed candidate by candidate by its exact costs.

Solutions of a chain are as good as its estimate of memory, a sum; the exact peak is a maximum over
moments. At the edge of what fits that decides: what the estimate calls larger may have the same
peak.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from meshfold.passes.one_pass.candidates import StrategyCandidate
from meshfold.passes.one_pass.priced import Priced, order_of

Price = Callable[[Sequence[StrategyCandidate]], Priced]
"""Exact costs of the program with a candidate for every region, or for every instance."""


BUDGET_STEPS = 1024
"""Budgets are raised by twice this share of a device's memory at first. Chosen:
layers hold more."""

MAX_PRICED_CHANGES = 256
"""Programs priced to make one faster. Chosen: a model whose layers all differ has thousands to
try."""


@dataclass
class Budgets:
    """Which estimate of memory to solve a chain for next, between one that fits and one that does
    not."""

    low_bytes: int
    """The program of this estimate fits."""

    high_bytes: int
    """The programs of larger estimates do not fit."""

    step_bytes: int
    """How far to go up where a program tells nothing better."""

    is_high_seen: bool = False

    @property
    def are_left(self) -> bool:
        return self.low_bytes < self.high_bytes

    def above(self, low_bytes: int) -> int:
        """Half way from what is too little to what is too much."""
        return (low_bytes + self.high_bytes + 1) // 2

    @property
    def middle(self) -> int:
        return self.above(self.low_bytes)

    def clipped(self, budget: int) -> int:
        return max(self.low_bytes, min(self.high_bytes, budget))

    def lower_high(self, high_bytes: int) -> None:
        self.high_bytes, self.is_high_seen = high_bytes, True

    def next(self, guess: int, is_known: bool) -> int:
        """guess: what the last program's peak makes likely. is_known: it was the best already; then
        nothing is between them but what `high_bytes` gives, if a program there did not fit."""
        if is_known and self.is_high_seen:
            return self.high_bytes
        if self.low_bytes < guess <= self.high_bytes:
            return guess
        self.step_bytes *= 2
        return min(self.low_bytes + self.step_bytes, self.middle)


def made_smaller(
    choices: Sequence[Sequence[StrategyCandidate]],
    least: list[StrategyCandidate],
    best: Priced,
    price: Price,
) -> tuple[list[StrategyCandidate], Priced]:
    """`least` with candidates changed while that makes its peak smaller, until it fits. choices:
    candidates per region; best: the costs of `least`."""
    for region, candidates in enumerate(choices):
        for candidate in candidates:
            if best.memory.fits:
                return least, best
            other = [*least[:region], candidate, *least[region + 1 :]]
            priced = price(other)
            if priced.memory.peak < best.memory.peak:
                least, best = other, priced
    return least, best


def made_faster(
    choices: Sequence[Sequence[StrategyCandidate]],
    regions: Sequence[int],
    best: Priced,
    assignment: Sequence[StrategyCandidate],
    price: Price,
) -> Priced:
    """The program of `assignment`, which fits, with candidates changed while it still fits and is
    faster, what gains most first, as far as MAX_PRICED_CHANGES go. Of instances of a region under
    one candidate all change, or the first, or the last. regions: of every instance; choices:
    candidates per region; best: the costs of `assignment`."""
    now, tried = list(assignment), 0
    while tried < MAX_PRICED_CHANGES:
        before = best
        for gain_s, where, candidate in _gains(choices, regions, now):
            if gain_s <= 0 or tried == MAX_PRICED_CHANGES:
                return best
            tried += 1
            other = list(now)
            for instance in where:
                other[instance] = candidate
            priced = price(other)
            if priced.memory.fits and order_of(priced) < order_of(best):
                now, best = other, priced
                break
        if best is before:
            return best
    return best


def _gains(
    choices: Sequence[Sequence[StrategyCandidate]],
    regions: Sequence[int],
    now: Sequence[StrategyCandidate],
) -> list[tuple[float, tuple[int, ...], StrategyCandidate]]:
    """(seconds, instances, their new candidate), what gains most first."""
    alike: dict[tuple[int, Hashable], list[int]] = {}
    for instance, (region, candidate) in enumerate(zip(regions, now, strict=True)):
        alike.setdefault((region, candidate.key), []).append(instance)
    found = [
        (len(where) * (now[where[0]].time_s - candidate.time_s), where, candidate)
        for (region, _), of in alike.items()
        for where in dict.fromkeys((tuple(of), (of[0],), (of[-1],)))
        for candidate in choices[region]
    ]
    return sorted(found, key=lambda gain: -gain[0])
