"""What ranks told each other in the first run of a region that runs twice, see
meshfold.runtime.recomputation: how many rows go where. The second run reads it here, and waits for nobody.
"""

from collections.abc import Callable, Iterator

from torch import Tensor


class KeptCounts:
    """The counts of one region in one step, in the order in which they were exchanged."""

    def __init__(self) -> None:
        self._counts: list[Tensor] = []
        self._again: Iterator[Tensor] | None = None

    def found(self, exchange: Callable[[], Tensor]) -> Tensor:
        """The counts that come next, exchanged or, in the second run, kept."""
        if self._again is not None:
            return next(self._again)
        self._counts.append(exchange())
        return self._counts[-1]

    def start_again(self) -> None:
        """The second run begins."""
        self._again = iter(self._counts)
