"""The mesh level: the best candidate of many by solving few, lowest proven bound first.

A candidate is a legal choice of degrees (mesh_degrees). Bounds come in tiers, cheap ones for all
candidates at once, dearer ones only where a candidate reaches the front:

    queue of (bound, tier, candidate), lowest first                              (best_first)
    pop; if its bound >= the best step found: all that is left is pruned, by the rule of its tier
    tiers left: raise the bound by the next one and put it back;  else: solve it

With true bounds the winner is the best of all candidates, up to the gaps of the solutions. The
order of the candidates decides nothing: ties go by (step to nine digits, candidate).
"""

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from meshfold.errors import InfeasibleError

PlanT = TypeVar("PlanT")
Candidate = tuple[int, ...]


@dataclass(frozen=True)
class Solution(Generic[PlanT]):
    """A solved candidate: its step, and what is proven about the best step it could have."""

    step_s: float
    lower_bound_s: float
    plan: PlanT


@dataclass(frozen=True)
class BoundRule:
    """A lower bound on the step of one candidate, by its number in the sequence; infinite where it
    cannot fit."""

    name: str
    bound_s: Callable[[int], float]


@dataclass(frozen=True)
class MeshSearchStats:
    """pruned: rule -> candidates not solved because of its bound. The counts and num_solved add up
    to num_candidates; num_infeasible of those solved fitted nowhere."""

    num_candidates: int
    num_solved: int
    num_infeasible: int
    pruned: Mapping[str, int]


@dataclass(frozen=True)
class MeshSearchResult(Generic[PlanT]):
    """The best candidate. lower_bound_s: no candidate has a faster plan."""

    candidate: Candidate
    solution: Solution[PlanT]
    lower_bound_s: float
    stats: MeshSearchStats

    @property
    def gap(self) -> float:
        """How much slower than the best plan this one can be at most, relative to it."""
        lower = self.lower_bound_s
        return self.solution.step_s / lower - 1 if lower > 0 else 0.0


def best_first(
    candidates: Sequence[Candidate],
    bounds: tuple[str, ArrayLike],
    solve: Callable[[int, float], Solution[PlanT] | None],
    *,
    refine: Sequence[BoundRule] = (),
    tolerance: float = 0.0,
) -> MeshSearchResult[PlanT]:
    """The candidate of least step.

    bounds: a rule's name and its lower bounds in seconds, one per candidate, infinite where it
    cannot fit. solve: the number of a candidate and the step to beat -> its solution, or None when
    nothing fits or nothing beats that step (never when something does). refine: dearer bounds, in
    the order they are tried. tolerance: relative, candidates that cannot be better by more are
    pruned. Raises InfeasibleError when no candidate fits.
    """
    first = np.asarray(bounds[1], float)
    if first.shape != (len(candidates),):
        raise ValueError(f"{len(candidates)} candidates, but bounds of shape {first.shape}")
    front = _Front(first.tolist(), candidates, refine)
    best: _Best[PlanT] | None = None
    lower_s, limit_s = np.inf, np.inf
    num_solved = num_infeasible = 0
    while (found := front.pop(limit_s / (1 + tolerance))) is not None:
        bound_s, index = found
        num_solved += 1
        solution = solve(index, limit_s)
        if solution is None:
            num_infeasible += best is None
            lower_s = min(lower_s, limit_s)
            continue
        lower_s = min(lower_s, max(bound_s, solution.lower_bound_s))
        key = (_rounded(solution.step_s), candidates[index])
        if best is None or key < best.key:
            best, limit_s = _Best(key, solution), min(limit_s, solution.step_s)
    rules = [bounds[0], *(rule.name for rule in refine)]
    if best is None:
        raise _infeasible(len(candidates), rules)
    lower_s = min(lower_s, front.least_s(), best.solution.step_s)
    pruned = front.left_by_tier()
    stats = MeshSearchStats(
        len(candidates),
        num_solved,
        num_infeasible,
        {rule: pruned[tier] for tier, rule in enumerate(rules)},
    )
    return MeshSearchResult(best.key[1], best.solution, lower_s, stats)


@dataclass(frozen=True)
class _Best(Generic[PlanT]):
    key: tuple[float, Candidate]
    solution: Solution[PlanT]


class _Front:
    """The candidates that are not solved yet, the lowest bound first."""

    def __init__(
        self, first_s: list[float], candidates: Sequence[Candidate], refine: Sequence[BoundRule]
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
            raised_s = max(bound_s, self._refine[tier].bound_s(index))
            heapq.heappush(self._queue, (raised_s, tier + 1, candidate, index))
        return None

    def least_s(self) -> float:
        """The lowest bound left."""
        return self._queue[0][0] if self._queue else float("inf")

    def left_by_tier(self) -> Counter[int]:
        """How many are left with a bound of each tier."""
        return Counter(tier for _, tier, _, _ in self._queue)


def _rounded(seconds: float) -> float:
    """To nine digits, so that rounding errors decide no tie."""
    return float(f"{seconds:.9g}")


def _infeasible(num_candidates: int, rules: Sequence[str]) -> InfeasibleError:
    return InfeasibleError(
        f"none of {num_candidates} choices of degrees fits (bounds: {', '.join(rules)}); allow "
        "more memory, more devices or a smaller batch",
        binding_constraint="memory",
    )
