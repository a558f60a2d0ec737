"""The processes that a profile measures: those of this job under torchrun, else local ones that it
starts."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from meshfold.cost_models.calibration.points import Profile
from meshfold.distributed.local_processes import Report, run_local
from meshfold.errors import OptionError
from meshfold.profiling.machine import usable_cores
from meshfold.profiling.session import Tell, profile

MOST_BY_DEFAULT = 4
"""Processes on a CPU."""
DEFAULT_MINUTES = {"cpu": 1.0, "cuda": 5.0}


def device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_processes() -> int:
    """One per GPU; on the CPU one per core, two to MOST_BY_DEFAULT."""
    if device_type() == "cuda":
        return torch.cuda.device_count()
    return min(max(usable_cores(), 2), MOST_BY_DEFAULT)


def in_job() -> bool:
    """Whether torchrun has started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def is_first() -> bool:
    """Whether this process writes: rank 0 of a job, or the one that starts others."""
    return os.environ.get("RANK", "0") == "0" or not in_job()


def profile_job(minutes: float, known: Profile | None, tell: Tell) -> Profile:
    """The profile of the processes of this job. Called in all of them."""
    with _joined() as device:
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        return profile(device, per_node, minutes, known, tell)


@contextmanager
def _joined() -> Iterator[torch.device]:
    """The default group, of torchrun's processes."""
    if device_type() == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def profile_local(
    num_processes: int,
    minutes: float,
    known: Profile | None,
    tell: Tell,
    run: Callable[..., list[Profile]] = run_local,
) -> Profile:
    """The profile of as many processes on this machine, which are started for it.

    Raises OptionError for more processes than GPUs, LocalProcessError where one fails.
    """
    if num_processes < 1:
        raise OptionError(f"--processes {num_processes}: must be 1 or more")
    if device_type() == "cuda" and num_processes > torch.cuda.device_count():
        raise OptionError(
            f"--processes {num_processes}: this machine has {torch.cuda.device_count()} GPUs; take "
            "one process per GPU, or hide the GPUs to measure the CPU (CUDA_VISIBLE_DEVICES=)"
        )
    found, *_ = run(
        num_processes,
        _profile_rank,
        minutes,
        known,
        on_report=lambda _, told: tell(*told),
        quiet=True,
    )
    return found


def _profile_rank(report: Report, minutes: float, known: Profile | None) -> Profile:
    device = torch.device("cpu")
    if device_type() == "cuda":
        device = torch.device("cuda", dist.get_rank())
        torch.cuda.set_device(device)
    tell = lambda now, total: report((now, total))  # noqa: E731
    return profile(device, dist.get_world_size(), minutes, known, tell)
