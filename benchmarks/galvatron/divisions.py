"""Uneven pipeline divisions for Galvatron's layer-wise cases.

The engine divides the layers evenly over the stages; its judge prices any division, but sees only
the first and the last stage in steady state, so work could hide in the middle. A division is
therefore chosen by the larger of the judge's time and the time at the pace of the slowest stage,

    sum C + (m - 1) max C,

and counts only where even that beats the best even division. A local search on the relaxation moves
one layer from a stage to another as long as that helps; where it ends, the stages are solved.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from galvatron.cases import Document, Found, judge_layerwise
from galvatron.layerwise import (
    RELATIVE_TIE,
    Candidate,
    Variant,
    best_candidate,
    candidates_of,
)

MAX_STARTS = 4
"""Tables with several stages to start from, the lowest bounds first."""

WORTH_TRYING = 1.25
"""Bounds of even divisions up to this multiple of the best time."""

MAX_MOVES = 30

Division = tuple[int, ...]


def plan_uneven(case: Document) -> Found | None:
    """The best plan with even stages, or a better one with uneven stages."""
    candidates = candidates_of(case)
    return improve_division(case, candidates, best_candidate(candidates))


def improve_division(
    case: Document, candidates: Sequence[Candidate], best: Found | None
) -> Found | None:
    """The best plan or a better one whose stages are divided unevenly, that one without a proof."""
    tried: set[int] = set()
    for candidate in candidates:
        limit_s = math.inf if best is None else best.time_s / best.batch
        variant = candidate.variant
        if candidate.bound_per_sample_s > WORTH_TRYING * limit_s or len(tried) == MAX_STARTS:
            break
        if variant.num_stages == 1 or variant.number in tried:
            continue
        tried.add(variant.number)
        division = _LocalSearch(variant, candidate.embedding).run()
        if division == variant.division:
            continue
        moved = variant.divided(case, division)
        time_s, _, plan = moved.solve(candidate.embedding, math.inf)
        if plan is None:
            continue
        slowest_s = _paced_s(judge_layerwise(case, plan).stage_s, moved.chunks)
        if max(time_s, slowest_s) / moved.batch < limit_s * (1 - RELATIVE_TIE):
            best = Found(plan, time_s, moved.batch, None)
    return best


def _paced_s(stage_s: Sequence[float], chunks: int) -> float:
    """1F1B when every stage keeps the pace of the slowest one."""
    return sum(stage_s) + (chunks - 1) * max(stage_s)


class _LocalSearch:
    """Divisions of one table with one embedding strategy, by their relaxed step time."""

    def __init__(self, variant: Variant, embedding: int) -> None:
        self.variant, self.embedding = variant, embedding
        self.extra_s = np.array(variant.embeddings[embedding]["time_nosync_s"], float)
        self._stage_s: dict[tuple[int, int, int], float] = {}

    def run(self) -> Division:
        """The division where no single move helps any more."""
        division = self.variant.division
        for _ in range(MAX_MOVES):
            best = min(self._neighbours(division), key=self._key)
            if self._key(best) >= self._key(division):
                break
            division = best
        return division

    def _neighbours(self, division: Division) -> list[Division]:
        """One layer moved from a stage to another; no stage without layers."""
        found = []
        for source, target in itertools.permutations(range(len(division)), 2):
            if division[source] > 1:
                moved = list(division)
                moved[source] -= 1
                moved[target] += 1
                found.append(tuple(moved))
        return found or [division]

    def _key(self, division: Division) -> tuple[float, Division]:
        times = self._times(division)
        if not np.isfinite(times).all():
            return math.inf, division
        paced_s = _paced_s(times.tolist(), self.variant.chunks)
        return max(float(self.variant.phases_s(times)), paced_s), division

    def _times(self, division: Division) -> np.ndarray:
        firsts = itertools.accumulate(division, initial=0)
        cells = zip(range(len(division)), firsts, division, strict=False)
        return np.array([self._time(*cell) for cell in cells]) + self.extra_s

    def _time(self, stage: int, first: int, count: int) -> float:
        key = (stage, first, count)
        if key not in self._stage_s:
            layers = self.variant.layers_of(stage, first, count)
            self._stage_s[key] = float(self.variant.stage_s(stage, layers)[self.embedding])
        return self._stage_s[key]
