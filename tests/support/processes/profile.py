"""What ranks of tests of the profile run."""

import torch
import torch.distributed as dist

from meshfold.profiling.collectives import KINDS, collective, contention, groups
from meshfold.profiling.processes import join_again
from meshfold.profiling.timing import Timer

CPU = torch.device("cpu")


def collectives_of_rank() -> tuple[tuple[int, ...], list[str]]:
    """Shape of the only group, and the kinds that ran."""
    (group,) = groups(CPU, 2)
    for kind in KINDS:
        collective(group, kind, 4096)()
    both = contention(group, Timer(CPU, 0.0))
    assert both is not None and both.both_s > 0
    group.mesh.close()
    point = group.point("all_reduce", 4096, 1.0)
    shape = point.num_ranks, point.num_nodes, point.max_per_node, point.min_per_node
    return shape, list(KINDS)


def agreed_again() -> tuple[float, str]:
    """The larger rank, agreed on by another default group, and its backend."""
    join_again("gloo")
    (largest,) = Timer(CPU, 0.0, dist.group.WORLD).agreed([float(dist.get_rank())])
    return largest, dist.get_backend()
