"""Row counts that ranks exchange in a region that recomputes (meshfold.runtime.recomputation): the
first run records them, the second reads them and waits for nobody.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor


class RecordedCounts:
    """The counts of a first run, in the order in which they are exchanged. node: what exchanges
    them, where a second run may leave something out."""

    def __init__(self) -> None:
        self.node = ""
        self._counts: dict[str, list[Tensor]] = {}

    def next(self, exchange: Callable[[], Tensor]) -> Tensor:
        """The next counts, exchanged."""
        counts = exchange()
        self._counts.setdefault(self.node, []).append(counts)
        return counts

    def replayed(self) -> "ReplayedCounts":
        """What a second run reads."""
        return ReplayedCounts(self._counts)


class ReplayedCounts:
    """The counts of a second run: those of the first, in its order, by node."""

    def __init__(self, counts: Mapping[str, Sequence[Tensor]]) -> None:
        self.node = ""
        self._counts: dict[str, Iterator[Tensor]] = {k: iter(of) for k, of in counts.items()}

    def next(self, _: Callable[[], Tensor]) -> Tensor:
        """The next counts, without an exchange."""
        return next(self._counts[self.node])
