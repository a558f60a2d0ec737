"""Which estimate of memory to solve for next, between one that fits and one that does not."""

from dataclasses import dataclass


@dataclass
class Budgets:
    """Estimates of memory to try: the program of `low` fits, those above `high` do not. step: how
    far to go up where a program tells nothing better."""

    low: int
    high: int
    step: int
    is_high_seen: bool = False

    @property
    def are_left(self) -> bool:
        return self.low < self.high

    def clipped(self, budget: int) -> int:
        return max(self.low, min(self.high, budget))

    def lower_high(self, high: int) -> None:
        self.high, self.is_high_seen = high, True

    def next(self, guess: int, is_known: bool) -> int:
        """guess: what the last program's peak makes likely. is_known: it was the best already; then
        nothing is between them but what `high` gives, if a program there did not fit."""
        if is_known and self.is_high_seen:
            return self.high
        if self.low < guess <= self.high:
            return guess
        self.step *= 2
        return min(self.low + self.step, (self.low + self.high + 1) // 2)
