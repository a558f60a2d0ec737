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
    rules = [bounds[0], *(rule.name for rule in refine)]
    first = np.asarray(bounds[1], float)
    if first.shape != (len(candidates),):
        raise ValueError(f"{len(candidates)} candidates, but bounds of shape {first.shape}")
    queue = [
        (bound, 0, candidate, index)
        for index, (bound, candidate) in enumerate(zip(first.tolist(), candidates, strict=True))
    ]
    heapq.heapify(queue)
    best: tuple[tuple[float, Candidate], int, Solution[PlanT]] | None = None
    lower_s, limit_s = np.inf, np.inf
    num_solved = num_infeasible = 0
    while queue and queue[0][0] * (1 + tolerance) < limit_s:
        bound, tier, candidate, index = heapq.heappop(queue)
        if tier < len(refine):
            raised = max(bound, refine[tier].bound_s(index))
            heapq.heappush(queue, (raised, tier + 1, candidate, index))
            continue
        num_solved += 1
        solution = solve(index, limit_s)
        if solution is None:
            num_infeasible += best is None
            lower_s = min(lower_s, limit_s)
            continue
        lower_s = min(lower_s, max(bound, solution.lower_bound_s))
        key = (_rounded(solution.step_s), candidate)
        if best is None or key < best[0]:
            best, limit_s = (key, index, solution), min(limit_s, solution.step_s)
    if best is None:
        raise _infeasible(len(candidates), rules)
    pruned = Counter(rules[min(tier, len(refine))] for _, tier, _, _ in queue)
    lower_s = min([lower_s, best[2].step_s, *(queue[0][:1] if queue else ())])
    stats = MeshSearchStats(
        len(candidates),
        num_solved,
        num_infeasible,
        {rule: pruned[rule] for rule in rules},
    )
    return MeshSearchResult(tuple(candidates[best[1]]), best[2], lower_s, stats)


def _rounded(seconds: float) -> float:
    """To nine digits, so that rounding errors decide no tie."""
    return float(f"{seconds:.9g}")


def _infeasible(num_candidates: int, rules: Sequence[str]) -> InfeasibleError:
    return InfeasibleError(
        f"none of {num_candidates} choices of degrees fits (bounds: {', '.join(rules)}); allow "
        "more memory, more devices or a smaller batch",
        binding_constraint="memory",
    )
