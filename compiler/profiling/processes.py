"""The processes that a profile measures: those of this job under torchrun, else local ones that it
starts."""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from meshfold.cost_models.calibration.points import Profile
from meshfold.cost_models.hardware.shared_cores import usable_cores
from meshfold.distributed.local_processes import Report, run_local
from meshfold.errors import OptionError
from meshfold.profiling.session import Tell, profile
from meshfold.torch_compat.process_groups import loopback_store, store_at

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
    device = _device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(_backend(device))
    try:
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        return profile(device, per_node, minutes, known, tell)
    finally:
        dist.destroy_process_group()


def _device(local_rank: int) -> torch.device:
    if device_type() == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _backend(device: torch.device) -> str:
    """Of a default group for tensors of the device and of the CPU."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


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
    device = _device(dist.get_rank())
    if device.type == "cuda":
        join_again(_backend(device))
    tell = lambda now, total: report((now, total))  # noqa: E731
    return profile(device, dist.get_world_size(), minutes, known, tell)


def join_again(backend: str) -> None:
    """Another default group of the same processes, all of this machine."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    port = torch.zeros(1, dtype=torch.int64)
    store = loopback_store() if rank == 0 else None
    if store is not None:
        port[0] = store.port
    dist.broadcast(port, 0)
    if store is None:
        store = store_at(int(port))
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
