"""What rules leave of a tree of candidates, and how many strategies each took: the first that takes
one counts it."""

import math
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from meshfold.errors import OptionError

LeafT = TypeVar("LeafT")


class Left(Generic[LeafT]):
    """What rules leave of a tree. pruned: what each took, in strategies. size: the number of
    strategies of a leaf."""

    def __init__(self, leaves: Sequence[LeafT], size: Callable[[LeafT], int]) -> None:
        self.left, self._size = leaves, size
        self.pruned = dict[str, int]()

    @property
    def num_strategies(self) -> int:
        return sum(map(self._size, self.left))

    def require(
        self,
        name: str,
        keeps: Callable[[LeafT], bool],
        why_not: Callable[[str, Sequence[LeafT]], str],
    ) -> None:
        """Leave what keeps a requirement. Raises OptionError where nothing does."""
        before = self.left
        self.prune(name, lambda leaf: not keeps(leaf))
        if not self.left:
            raise OptionError(why_not(name, before))

    def prune(self, name: str, prunes: Callable[[LeafT], bool]) -> None:
        """Take what a pruning rule takes."""
        before = [(leaf, prunes(leaf)) for leaf in self.left]
        self.left = [leaf for leaf, is_pruned in before if not is_pruned]
        if taken := sum(self._size(leaf) for leaf, is_pruned in before if is_pruned):
            self.pruned[name] = self.pruned.get(name, 0) + taken


def divisors(number: int) -> list[int]:
    """All divisors, increasing."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})
