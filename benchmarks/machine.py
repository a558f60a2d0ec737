"""The preset local-cpu with the figures of this machine at this hour.

Presets have figures of one machine; what is predicted for another one, or beside other work, is off
by what its cores and its loopback differ. Benchmarks that hold predictions against measurements
plan with what they measure first, in the same processes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshfold
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.options import CompileOptions

REPEATS = 7
SMALL_NUMEL, LARGE_NUMEL = 4096, 4_000_000
"""Of the all-reduces that are timed: one that is all start, one that is all bytes."""
WIDTH = 1024
"""Of the product that is timed."""
STEP_S = 1e-5
"""Between the two launches that a step is predicted with."""
SOURCE = "measured in this run"


@dataclass(frozen=True)
class Sample:
    """A model that one process runs, and its step: forward and backward on `batch`."""

    model: nn.Module
    batch: dict[str, Tensor]
    step: Callable[[], object]


def this_machine(large: Sample, small: Sample) -> ClusterSpec:
    """local-cpu for the processes of this job, all of which work at once meanwhile. The same on all
    ranks.

    How fast a product and a copy are by themselves is timed. From what steps take beyond that
    follows by how much kernels are slower in a model, and what each costs beside its work; of the
    small one that is nearly all.
    """
    size = dist.get_world_size()
    flops_per_s, bytes_per_s = _agreed(*_kernel_rates())
    launch_s, slower = _fitted((large, small), flops_per_s, bytes_per_s)
    short_s, long_s = (_median_s(_reduction(n)) for n in (SMALL_NUMEL, LARGE_NUMEL))
    # Twice (n - 1) / n of the bytes leave every rank.
    volume = 2 * (size - 1) / size * 4 * (LARGE_NUMEL - SMALL_NUMEL)
    launch_s, slower, start_s, link_bytes_per_s = _agreed(
        launch_s, slower, short_s, volume / (long_s - short_s)
    )
    cluster = _with_rates(
        resolve_cluster("local-cpu", size), flops_per_s / slower, bytes_per_s / slower, launch_s
    )
    (group,) = cluster.groups
    link = replace(
        group.link,
        start_s=start_s,
        latency_s=0.0,
        bytes_per_s=link_bytes_per_s,
        bytes_per_s_by_ranks=(),
        source=SOURCE,
    )
    return replace(cluster, groups=(replace(group, link=link),))


def _kernel_rates() -> tuple[float, float]:
    """(flops per second, bytes of memory per second)."""
    square, large = torch.zeros(WIDTH, WIDTH), torch.zeros(LARGE_NUMEL)
    product_s = _median_s(lambda: torch.mm(square, square))
    copy_s = _median_s(large.clone)
    return 2 * WIDTH**3 / product_s, 2 * 4 * LARGE_NUMEL / copy_s


def _fitted(
    samples: Sequence[Sample], flops_per_s: float, bytes_per_s: float
) -> tuple[float, float]:
    """(seconds to start a kernel, by how much kernels are slower in a model), of two steps: each is
    predicted as what kernels work, and so much more per kernel."""
    one = resolve_cluster("local-cpu", 1)
    rows = []
    for sample in samples:
        work_s, with_starts_s = (
            _predicted_s(sample, _with_rates(one, flops_per_s, bytes_per_s, launch_s))
            for launch_s in (0.0, STEP_S)
        )
        rows.append([(with_starts_s - work_s) / STEP_S, work_s])
    steps_s = [_median_s(sample.step) for sample in samples]
    launch_s, slower = torch.linalg.solve(_doubles(rows), _doubles(steps_s)).tolist()
    return max(launch_s, 0.0), slower


def _predicted_s(sample: Sample, cluster: ClusterSpec) -> float:
    plan = meshfold.find_plan(sample.model, cluster, sample.batch, options=CompileOptions(pins={}))
    assert plan.simulated is not None
    return plan.simulated.step_s - plan.time.optimizer_s


def _with_rates(
    cluster: ClusterSpec, flops_per_s: float, bytes_per_s: float, launch_s: float
) -> ClusterSpec:
    """flops_per_s: in float32; other dtypes in proportion."""
    (group,) = cluster.groups
    known = group.device.peak_flops_per_s
    factor = flops_per_s / known["float32"]
    device = replace(
        group.device,
        memory_bytes_per_s=bytes_per_s,
        peak_flops_per_s={dtype: x * factor for dtype, x in known.items()},
        launch_s=launch_s,
        source=SOURCE,
    )
    return replace(cluster, groups=(replace(group, device=device),))


def _agreed(*numbers: float) -> list[float]:
    """Those of rank 0."""
    measured = _doubles(numbers)
    dist.broadcast(measured, 0)
    found: list[float] = measured.tolist()
    return found


def _doubles(numbers: Sequence[object]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


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
