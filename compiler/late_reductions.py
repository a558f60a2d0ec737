"""Gradients of replicated parameters, added up over the microbatches of a step.

A bucket that is only all-reduced is reduced with the last microbatch, once per step; until then its
flat gradients are added up here. Buckets that are gathered (ZeRO-3) keep shards, so they are
reduce-scattered with every microbatch; what their shards still owe to other axes waits here, too.
"""

from torch import Tensor

Key = tuple[int, ...]
"""(instance, bucket), and the member where only one is meant."""


class LateReductions:
    """What one stage still has to reduce. is_last: the microbatch whose backward runs is the last
    one; of a step in one pass the only one."""

    def __init__(self) -> None:
        self.is_last = True
        self._sums: dict[Key, Tensor] = {}

    def add(self, key: Key, gradient: Tensor) -> Tensor | None:
        """The sum over all microbatches, ready to be reduced; None before the last one. `gradient`
        is given up."""
        before = self._sums.pop(key, None)
        total = gradient if before is None else before.add_(gradient)
        if self.is_last:
            return total
        self._sums[key] = total
        return None

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._sums
