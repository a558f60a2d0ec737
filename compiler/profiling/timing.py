"""Seconds of a call, on all ranks at once: the slowest rank of every sample, the median of the
samples. Without a process group, those of this process."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

MOST_RUNS = 10_000
"""Of one sample."""
SAMPLES = 5


@dataclass(frozen=True)
class Timer:
    """sample_s: how long a sample is to take; runs are repeated for it."""

    device: torch.device
    sample_s: float
    control: dist.ProcessGroup | None = None
    """A group of all ranks for tensors of the CPU; None without other ranks."""

    def seconds(self, run: Callable[[], object]) -> float | None:
        """Of one `run()`; None where it raises: an op, a dtype or a size that the device lacks."""
        try:
            run()
            self._finish()
            failed = 0.0
        except RuntimeError:
            failed = 1.0
        if self.agreed([failed])[0]:
            return None
        (one_s,) = self.agreed([self._sample(run, 1)])
        num_runs = int(min(max(self.sample_s / one_s, 1), MOST_RUNS))
        wanted = int(min(max(SAMPLES * self.sample_s / (one_s * num_runs), 1), SAMPLES))
        if one_s > self.sample_s * SAMPLES:
            return one_s
        return median(self.agreed([self._sample(run, num_runs) for _ in range(wanted)]))

    def agreed(self, numbers: Sequence[float]) -> list[float]:
        """The largest of all ranks, number by number."""
        if self.control is None:
            return list(numbers)
        found = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.control)
        largest: list[float] = found.tolist()
        return largest

    def _sample(self, run: Callable[[], object], num_runs: int) -> float:
        """Seconds of one of several runs in a row; ranks begin together."""
        self.agreed([0.0])
        start = time.perf_counter()
        for _ in range(num_runs):
            run()
        self._finish()
        return max(time.perf_counter() - start, 1e-9) / num_runs

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
