"""The level above meshes: the best candidate of many by solving few, lowest proven bound first.

A candidate is a mesh (candidate_mesh.py), or a choice of degrees with stages and microbatches
(passes/pipeline/search.py). Its bound rises while dearer things are asked of it, which is done only
where it reaches the front:

    queue of (bound, order), lowest first                                        (BoundQueue)
    front; if its bound >= the best step found: all that is left is pruned       (best_first)
    raise its bound and put it back;  where nothing raises it any more: solve it

With true bounds the winner is the best of all candidates, up to the gaps of the solutions. The
sequence of the candidates decides nothing: ties go by their orders, and by those of their plans.
"""

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

Order = tuple[Any, ...]
"""What decides between equals: less comes first."""


@dataclass(frozen=True)
class Solution:
    """What came of a candidate, which keeps its plan. lower_bound_s: no plan of it is faster,
    infinite where nothing fits. step_s: of its plan, infinite where none is fast enough; order:
    the same with what decides between equal steps."""

    lower_bound_s: float
    step_s: float = math.inf
    order: Order = ()


class Candidate(Protocol):
    """What has a bound that can be raised, and can be solved."""

    @property
    def bound_s(self) -> float:
        """Seconds that no plan of it is below; infinite where it has none."""

    @property
    def order(self) -> Order:
        """Its place among those of the same bound."""

    def raise_bound(self) -> bool:
        """Work out a dearer bound; False where there is none left."""

    def solve(self, beat_s: float, /) -> Solution:
        """Find its best plan, if that may take less than `beat_s`."""


CandidateT = TypeVar("CandidateT", bound=Candidate)


@dataclass(frozen=True)
class BestFirstResult(Generic[CandidateT]):
    """best: the candidate of the best plan, None where there is no plan. lower_bound_s: no
    candidate has a faster plan. solved: in that order; left: the others, the lowest bound first."""

    best: CandidateT | None
    lower_bound_s: float
    solved: tuple[CandidateT, ...]
    left: tuple[CandidateT, ...]


def best_first(
    candidates: Sequence[CandidateT],
    *,
    beat_s: float = math.inf,
    tolerance: float = 0.0,
    prunes: bool = True,
) -> BestFirstResult[CandidateT]:
    """The candidate of least step. beat_s: of a plan that is there already; the best of these need
    not be faster. tolerance: relative, candidates that cannot be better by more are left. prunes:
    otherwise all are solved."""
    queue = BoundQueue(candidates)
    best: CandidateT | None = None
    best_order: Order = ()
    solved, lower_s = [], math.inf
    while (found := queue.pop(beat_s / (1 + tolerance) if prunes else math.inf)) is not None:
        bound_s, solution = found.bound_s, found.solve(beat_s)
        solved.append(found)
        lower_s = min(lower_s, solution.step_s, max(bound_s, solution.lower_bound_s))
        if math.isfinite(solution.step_s) and (best is None or solution.order < best_order):
            best, best_order, beat_s = found, solution.order, min(beat_s, solution.step_s)
    left = queue.left()
    return BestFirstResult(best, min([lower_s, *(x.bound_s for x in left)]), tuple(solved), left)


class BoundQueue(Generic[CandidateT]):
    """Candidates, the lowest bound first."""

    def __init__(self, candidates: Sequence[CandidateT]) -> None:
        self._candidates = candidates
        self._queue = [self._entry(k) for k in range(len(candidates))]
        heapq.heapify(self._queue)

    def pop(self, below_s: float) -> CandidateT | None:
        """The candidate whose bound is the lowest of all when nothing raises it any more; None
        where that is not below `below_s`."""
        while self._queue and self._queue[0][0] < below_s:
            k = heapq.heappop(self._queue)[-1]
            if not self._candidates[k].raise_bound():
                return self._candidates[k]
            heapq.heappush(self._queue, self._entry(k))
        return None

    def left(self) -> tuple[CandidateT, ...]:
        """What was not popped, the lowest bound first."""
        return tuple(self._candidates[k] for *_, k in sorted(self._queue))

    def _entry(self, k: int) -> tuple[float, Order, int]:
        candidate = self._candidates[k]
        return candidate.bound_s, candidate.order, k


class TieredCandidate(ABC):
    """The base of candidates of given bounds. key: decides between equal bounds, those of fewer
    tiers first, and equal steps. tiers: bounds in seconds, in the order they are asked."""

    def __init__(self, key: Order, bound_s: float, tiers: Sequence[Callable[[], float]]) -> None:
        self.bound_s = bound_s
        self._key, self._tiers, self._num_asked = key, tiers, 0

    @property
    def order(self) -> Order:
        return self._num_asked, self._key

    def raise_bound(self) -> bool:
        """Ask the next tier."""
        if self._num_asked == len(self._tiers):
            return False
        self.bound_s = max(self.bound_s, self._tiers[self._num_asked]())
        self._num_asked += 1
        return True

    def ask_last_again(self) -> None:
        """The last tier counts as not asked."""
        self._num_asked = min(self._num_asked, len(self._tiers) - 1)

    @abstractmethod
    def solve(self, beat_s: float, /) -> Solution:
        """As for Candidate."""

    def solution(self, lower_bound_s: float, step_s: float) -> Solution:
        """Its solution; steps are compared to nine digits, so that rounding errors decide no
        tie."""
        return Solution(lower_bound_s, step_s, (float(f"{step_s:.9g}"), self._key))


class SolvedCandidate(TieredCandidate):
    """A plan that is there already, before any other of the same bound or step."""

    def __init__(self, bound_s: float, step_s: float) -> None:
        super().__init__((), bound_s, ())
        self._step_s = step_s

    def solve(self, beat_s: float, /) -> Solution:
        """What was known."""
        return self.solution(self.bound_s, self._step_s)
