"""The cluster that the processes of a job are, measured in this run. Presets have figures of one
machine; what is predicted for another one, or beside other work, is off by what they differ."""

import torch
import torch.distributed as dist

from meshfold.cli.profile_command import cluster_of
from meshfold.ir.cluster import ClusterSpec
from meshfold.profiling.session import profile


def this_machine(minutes: float) -> ClusterSpec:
    """For the processes of this job, all of which work at once meanwhile and are on this machine's
    CPU. The same on all ranks."""
    size = dist.get_world_size()
    found = profile(torch.device("cpu"), size, minutes, None, lambda *_: None)
    cluster: ClusterSpec = cluster_of(found, "here").cluster
    return cluster
