"""The mesh level: the best candidate of many by solving few, lowest proven bound first.

A candidate is a legal choice of degrees (passes/pipeline/tree.py). Bounds come in tiers, cheap ones
for all candidates at once, dearer ones only where a candidate reaches the front:

    queue of (bound, tier, candidate), lowest first                              (best_first)
    pop; if its bound >= the best step found: all that is left is pruned
    tiers left: raise the bound by the next one and put it back;  else: solve it

With true bounds the winner is the best of all candidates, up to the gaps of the solutions. The
order of the candidates decides nothing: ties go by (step to nine digits, candidate).
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike

PlanT = TypeVar("PlanT")
Candidate = tuple[int, ...]


@dataclass(frozen=True)
class Solution(Generic[PlanT]):
    """A solved candidate: its step, and what is proven about the best step it could have."""

    step_s: float
    lower_bound_s: float
    plan: PlanT


Bound = Callable[[int], float]
"""A lower bound in seconds on the step of one candidate, by its number in the sequence; infinite
where it cannot fit."""


@dataclass(frozen=True)
class BestFirstResult(Generic[PlanT]):
    """The solution of the best candidate. lower_bound_s: no candidate has a faster plan."""

    solution: Solution[PlanT]
    lower_bound_s: float


def best_first(
    candidates: Sequence[Candidate],
    bounds_s: ArrayLike,
    solve: Callable[[int, float], Solution[PlanT] | float],
    *,
    refine: Sequence[Bound] = (),
    tolerance: float = 0.0,
) -> BestFirstResult[PlanT] | None:
    """The candidate of least step; None when none fits.

    bounds_s: lower bounds in seconds, one per candidate, infinite where it cannot fit. solve: the
    number of a candidate and the step to beat -> its solution, or, where none is found that beats
    that step, a lower bound in seconds on all that it could have, infinite when nothing fits.
    refine: dearer bounds, in the order they are tried. tolerance: relative, candidates that cannot
    be better by more are pruned.
    """
    first = np.asarray(bounds_s, float)
    if first.shape != (len(candidates),):
        raise ValueError(f"{len(candidates)} candidates, but bounds of shape {first.shape}")
    front = _Front(first.tolist(), candidates, refine)
    best: Solution[PlanT] | None = None
    best_key: tuple[float, Candidate] = (np.inf, ())
    lower_s, limit_s = np.inf, np.inf
    while (found := front.pop(limit_s / (1 + tolerance))) is not None:
        bound_s, index = found
        solution = solve(index, limit_s)
        if not isinstance(solution, Solution):
            lower_s = min(lower_s, max(bound_s, solution))
            continue
        lower_s = min(lower_s, max(bound_s, solution.lower_bound_s))
        key = (_rounded(solution.step_s), candidates[index])
        if best is None or key < best_key:
            best, best_key, limit_s = solution, key, min(limit_s, solution.step_s)
    if best is None:
        return None
    lower_s = min(lower_s, front.least_s(), best.step_s)
    return BestFirstResult(best, lower_s)


class _Front:
    """The candidates that are not solved yet, the lowest bound first."""

    def __init__(
        self, first_s: list[float], candidates: Sequence[Candidate], refine: Sequence[Bound]
    ) -> None:
        self._refine = refine
        self._queue = [
            (bound_s, 0, candidate, index)
            for index, (bound_s, candidate) in enumerate(zip(first_s, candidates, strict=True))
        ]
        heapq.heapify(self._queue)

    def pop(self, below_s: float) -> tuple[float, int] | None:
        """(bound, number) of a candidate whose bound of the last tier is the lowest of all; None
        when none is below `below_s`."""
        while self.least_s() < below_s:
            bound_s, tier, candidate, index = heapq.heappop(self._queue)
            if tier == len(self._refine):
                return bound_s, index
            raised_s = max(bound_s, self._refine[tier](index))
            heapq.heappush(self._queue, (raised_s, tier + 1, candidate, index))
        return None

    def least_s(self) -> float:
        """The lowest bound left."""
        return self._queue[0][0] if self._queue else float("inf")


def _rounded(seconds: float) -> float:
    """Rounds to nine digits, so that rounding errors decide no tie."""
    return float(f"{seconds:.9g}")
