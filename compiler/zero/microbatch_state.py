"""What the microbatches of a step have in common in one stage.

sums    gradients that are reduced, or cast, once per step: of groups that are not gathered, and of
        gathered ones whose gradients are accumulated unsharded (ZeRO 1); flat, those of later
        microbatches are added where the first ones lie. Other gathered groups (ZeRO 2 and 3) keep
        shards, so they are reduce-scattered with every microbatch and added up here until the last
        (shard_sums.py), when what they owe to other axes is reduced.
unsharded   parameters that are gathered once per step (ZeRO 1 and 2), from the first forward to the
        last backward
started   gathers that began before the first microbatch arrived, until its forward takes them
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

Key = tuple[int, ...]
"""(instance, group), and the member where only one is meant."""


class Started(Protocol):
    """A gather in flight (meshfold.zero.parameter_gather)."""

    def take(self, key: Key) -> list[Tensor]: ...


class SharedStep:
    """is_last: the microbatch whose backward runs is the last one; of a step in one pass the only
    one. unsharded: the members of each group that is gathered once. started: the gather of each
    group that is gathered ahead."""

    def __init__(self) -> None:
        self.is_last = True
        self.unsharded: dict[Key, list[Tensor]] = {}
        self.started: dict[Key, Started] = {}
        self._sums: dict[Key, Tensor] = {}
        self._reached: set[Key] = set()

    def note_reached(self, key: Key, gradients: Sequence[Tensor | None]) -> None:
        """Which members of a group a backward has brought gradients to."""
        self._reached.update((*key, m) for m, g in enumerate(gradients) if g is not None)

    def is_reached(self, key: Key) -> bool:
        """Whether a member got a gradient from any microbatch. One that gets none keeps None, as it
        does by itself: an optimizer with weight decay moves a parameter whose gradient is 0."""
        return key in self._reached

    def add(self, key: Key, gradient: Tensor) -> Tensor | None:
        """The sum over all microbatches, ready to be reduced; None before the last one. `gradient`,
        the sum itself or what is to be added to it, is given up."""
        before = self._sums.pop(key, None)
        total = gradient if before is None or before is gradient else before.add_(gradient)
        if self.is_last:
            return total
        self._sums[key] = total
        return None

    def sum_of(self, key: Key) -> Tensor | None:
        """The sum of earlier microbatches. What is added to it in place is passed to `add`."""
        return self._sums.get(key)

    def is_only(self, key: Key) -> bool:
        """Whether the microbatch at hand has the full gradient."""
        return self.is_last and not self.waits(key)

    def waits(self, key: Key) -> bool:
        """Whether gradients of earlier microbatches wait to be reduced."""
        return key in self._sums

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be reduced."""
        return not self._sums
