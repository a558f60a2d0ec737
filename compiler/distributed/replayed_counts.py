"""Row counts that ranks exchange in a region with full recomputation
(meshfold.runtime.recomputation): the first run records them, the second reads them and waits for
nobody.
"""

from collections.abc import Callable, Sequence

from torch import Tensor


class RecordedCounts:
    """The counts of a first run, in the order in which they are exchanged."""

    def __init__(self) -> None:
        self._counts: list[Tensor] = []

    def next(self, exchange: Callable[[], Tensor]) -> Tensor:
        """The next counts, exchanged."""
        self._counts.append(exchange())
        return self._counts[-1]

    def replayed(self) -> "ReplayedCounts":
        """What a second run reads."""
        return ReplayedCounts(self._counts)


class ReplayedCounts:
    """The counts of a second run: those of the first, in its order."""

    def __init__(self, counts: Sequence[Tensor]) -> None:
        self._counts = iter(counts)

    def next(self, _: Callable[[], Tensor]) -> Tensor:
        """The next counts, without an exchange."""
        return next(self._counts)
