"""Functions that tests run on other processes: those import this module by name."""

import os

import torch
import torch.distributed as dist

from meshfold.distributed.local_processes import Report
from meshfold.errors import OptionError


def summed(report: Report, start: int) -> float:
    x = torch.tensor(float(start + dist.get_rank()))
    report(x.item())
    dist.all_reduce(x)
    return x.item()


def fails_on_one(_: Report, how: str) -> None:
    if dist.get_rank() == 1:
        if how == "dies":
            os._exit(3)
        raise OptionError("no\n  batch") if how == "user" else KeyError("lost")
    # The others wait for rank 1 and are ended.
    dist.barrier()
