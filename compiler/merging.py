"""Which reductions of gradients run as one (Jia et al., "Highly Scalable Deep Learning Training
System with Mixed-Precision: Training ImageNet in Four Minutes", 2018: tensor fusion).

Reductions come in the order of the backward: instances last to first, of each its buckets. Those of
one kind, over the same axes and of one dtype follow each other, whatever comes in between; they are
merged as long as all together have no more than `most_bytes`:

    sizes 3 3 3 20 3 3   most_bytes 8   (3 3) (3) (20) (3 3)

A merged reduction starts when the gradients of its last member are ready. Layer 0: the simulator
and the program of a rank ask here, so that what was simulated is what runs.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

Place = tuple[int, int]
"""(instance, number of the bucket in its region)."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """Of the gradients of one bucket. key: equal for those that can be merged; num_bytes: as
    CostModel.collective_s takes them."""

    place: Place
    key: Hashable
    num_bytes: int


def merged_places(
    reductions: Iterable[Reduction], most_bytes: int
) -> tuple[tuple[Place, ...], ...]:
    """The reductions that run as one, two or more each, by the place of the first. reductions: in
    the order of the backward. Linear."""
    groups: list[list[Reduction]] = []
    open_group: dict[Hashable, tuple[list[Reduction], int]] = {}
    for reduction in reductions:
        group, num_bytes = open_group.get(reduction.key, ([], 0))
        if not group or num_bytes + reduction.num_bytes > most_bytes:
            group, num_bytes = [], 0
            groups.append(group)
        group.append(reduction)
        open_group[reduction.key] = group, num_bytes + reduction.num_bytes
    return tuple(tuple(r.place for r in group) for group in groups if len(group) > 1)
