"""Which collectives of parameters run as one (Jia et al., "Highly Scalable Deep Learning Training
System with Mixed-Precision: Training ImageNet in Four Minutes", 2018: tensor fusion).

Reductions of gradients come in the order of the backward, gathers in that of the forward: instances
one after the other, of each its buckets. Those of one kind, over the same axes and of one dtype
follow each other, whatever comes in between; they are merged as long as all together have no more
than `most_bytes`:

    sizes 3 3 3 20 3 3   most_bytes 8   (3 3) (3) (20) (3 3)

A merged reduction starts when the gradients of its last member are ready, a merged gather where
that of its first member would; the backward gathers again what it reads again, together, too.
Layer 0: the simulator and the program of a rank ask here, so that what was simulated is what runs.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

Place = tuple[int, int]
"""(instance, number of the bucket in its region)."""


@dataclass(frozen=True, slots=True)
class Mergeable:
    """The gather or the reduction of one bucket. key: equal for those that can be merged;
    num_bytes: as CostModel.collective_s takes them."""

    place: Place
    key: Hashable
    num_bytes: int


def merged_places(them: Iterable[Mergeable], most_bytes: int) -> tuple[tuple[Place, ...], ...]:
    """What runs as one, two or more each, by the place of the first. them: in the order in which
    they come. Linear."""
    groups: list[list[Mergeable]] = []
    open_group: dict[Hashable, tuple[list[Mergeable], int]] = {}
    for one in them:
        group, num_bytes = open_group.get(one.key, ([], 0))
        if not group or num_bytes + one.num_bytes > most_bytes:
            group, num_bytes = [], 0
            groups.append(group)
        group.append(one)
        open_group[one.key] = group, num_bytes + one.num_bytes
    return tuple(tuple(one.place for one in group) for group in groups if len(group) > 1)
