"""Which collectives of parameters run as one (Jia et al., "Highly Scalable Deep Learning Training
System with Mixed-Precision: Training ImageNet in Four Minutes", 2018: tensor fusion).

Reductions of gradients come in the order of the backward, gathers in that of the forward: instances
one after the other, of each its parameter groups. Those of one kind, over the same axes and of one
dtype follow each other, whatever comes in between; they share a bucket as long as all have no more
than `most_bytes`:

    sizes 3 3 3 20 3 3   most_bytes 8   (3 3) (3) (20) (3 3)

The reduction of a bucket starts when the gradients of its last member are ready, its gather where
that of its first member would; what the backward gathers again it gathers in buckets, too.
Layer 0: the simulator and the program of a rank ask here, so that what was simulated is what runs.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from meshfold.ir.limits import Count

GroupRef = tuple[Count, Count]
"""A parameter group of an instance: (instance, number of the group in its region)."""


@dataclass(frozen=True, slots=True)
class BucketMember:
    """The gather or the reduction of one parameter group."""

    group: GroupRef
    key: Hashable
    """Equal for those that can share a bucket."""
    num_bytes: int
    """Bytes as CostModel.collective_s takes them."""


def fill_buckets(them: Iterable[BucketMember], most_bytes: int) -> tuple[tuple[GroupRef, ...], ...]:
    """The buckets of two or more members, in the order of their first. them: in the order in which
    they come. Linear."""
    groups: list[list[BucketMember]] = []
    open_group: dict[Hashable, tuple[list[BucketMember], int]] = {}
    for one in them:
        group, num_bytes = open_group.get(one.key, ([], 0))
        if not group or num_bytes + one.num_bytes > most_bytes:
            group, num_bytes = [], 0
            groups.append(group)
        group.append(one)
        open_group[one.key] = group, num_bytes + one.num_bytes
    return tuple(tuple(one.group for one in group) for group in groups if len(group) > 1)
