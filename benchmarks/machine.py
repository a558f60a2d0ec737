"""The preset local-cpu with the figures of this machine at this hour.

Presets have figures of one machine; what is predicted for another one, or beside other work, is off
by what its cores and its loopback differ. Benchmarks that hold predictions against measurements
plan with what they measure first, in the same processes.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshfold
from meshfold.cluster import ClusterSpec
from meshfold.cost_models.devices import resolve_cluster
from meshfold.options import CompileOptions

REPEATS = 7
SMALL_NUMEL, LARGE_NUMEL = 4096, 4_000_000
"""Of the all-reduces that are timed: one that is all start, one that is all bytes."""


def this_machine(
    model: nn.Module, batch: dict[str, Tensor], step: Callable[[], object]
) -> ClusterSpec:
    """local-cpu for the processes of this job. step: forward and backward of `model` on `batch` in
    one process, which says how fast cores are. The same on all ranks."""
    size = dist.get_world_size()
    alone = resolve_cluster("local-cpu", 1)
    plan = meshfold.find_plan(model, alone, batch, options=CompileOptions(pins={}))
    assert plan.simulated is not None
    factor = _median_s(step) / (plan.simulated.step_s - plan.time.optimizer_s)
    small_s, large_s = (_median_s(_reduction(n)) for n in (SMALL_NUMEL, LARGE_NUMEL))
    # Twice (n - 1) / n of the bytes leave every rank.
    volume = 2 * (size - 1) / size * 4 * (LARGE_NUMEL - SMALL_NUMEL)
    measured = torch.tensor([factor, small_s, volume / (large_s - small_s)], dtype=torch.float64)
    dist.broadcast(measured, 0)
    factor, small_s, bytes_per_s = measured.tolist()
    cluster = resolve_cluster("local-cpu", size)
    (group,) = cluster.groups
    device = replace(
        group.device,
        memory_bytes_per_s=group.device.memory_bytes_per_s / factor,
        peak_flops_per_s={d: x / factor for d, x in group.device.peak_flops_per_s.items()},
        launch_s=group.device.launch_s * factor,
        source="measured in this run",
    )
    link = replace(
        group.link,
        start_s=small_s,
        latency_s=0.0,
        bytes_per_s=bytes_per_s,
        bytes_per_s_by_ranks=(),
        source="measured in this run",
    )
    return replace(cluster, groups=(replace(group, device=device, link=link),))


def _reduction(numel: int) -> Callable[[], None]:
    buffer = torch.zeros(numel)
    return lambda: dist.all_reduce(buffer)


def _median_s(run: Callable[[], object]) -> float:
    """From a barrier to the last rank; the first run is not counted."""
    seconds = []
    for _ in range(REPEATS + 1):
        dist.barrier()
        start = time.perf_counter()
        run()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])
