"""Five-fold split by dataset: what is fitted to the runs of some publications, judged on others.

What is fitted is one factor per family of devices, all that the efficiencies of a device can take
up together: the median of published over predicted step time of the other four fifths. Errors of a
fifth are given under the factors of the others, beside those of the model as it is. A family that
the others do not have keeps the factor 1.

Datasets go to folds whole, the one with most runs first, each to the fold that has fewest.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from published.score import Scored, Summary, by_dataset, family_of, timed

NUM_FOLDS = 5


@dataclass(frozen=True)
class Fold:
    """One fifth. factors: by family of devices, of the other four."""

    datasets: tuple[str, ...]
    factors: Mapping[str, float]
    fitted: Summary
    """Errors of its runs under the factors; as_it_is: without."""
    as_it_is: Summary


def folds(scored: Sequence[Scored]) -> list[Fold]:
    """The folds that have runs with both times."""
    groups = by_dataset(timed(scored))
    parts: list[list[str]] = [[] for _ in range(NUM_FOLDS)]
    for name in sorted(groups, key=lambda n: -len(groups[n])):
        min(parts, key=lambda part: sum(len(groups[n]) for n in part)).append(name)
    return [_fold(groups, part) for part in parts if part]


def _fold(groups: Mapping[str, Sequence[Scored]], part: Sequence[str]) -> Fold:
    factors = _factors([s for name in groups if name not in part for s in groups[name]])
    held_out = [s for name in part for s in groups[name]]
    fitted = [(1 + s.error) * factors.get(family_of(s.run), 1.0) - 1 for s in held_out]
    as_it_is = Summary.of([s.error for s in held_out])
    return Fold(tuple(part), factors, Summary.of(fitted), as_it_is)


def _factors(scored: Sequence[Scored]) -> dict[str, float]:
    ratios = defaultdict(list)
    for one in scored:
        ratios[family_of(one.run)].append(1 / (1 + one.error))
    return {family: median(values) for family, values in sorted(ratios.items())}
