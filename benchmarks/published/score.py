"""How far predictions are from published runs.

error      predicted / published - 1; mean absolute error, bias (mean error), worst case
regret     in a group of plans of the same model, devices and batch: published time of the plan
           that is predicted fastest, over the least published time, - 1
yardstick  one efficiency per family of devices: ideal time x 4/3 if all is recomputed x
           (1 + (p - 1) / (v m)) for a pipeline, without communication. Ideal time = model flops
           over the dense 16-bit peak; the efficiency is the median of the runs themselves.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from published.predict import Prediction
from published.runs import Run

LEAST_IN_GROUP = 5
"""Plans of a group in which they are ranked."""

PEAK_TFLOPS: Mapping[str, float] = {
    "V100": 125,
    "A100": 312,
    "H100": 989.4,
    "H200": 989.4,
    "B200": 2250,
}
"""Dense 16-bit, by the first word of a device's name."""

LEFT_OUT_OF_YARDSTICK = "vtrain_single"
"""A dataset of small models, bound by launches: it would decide the medians of all A100s."""


@dataclass(frozen=True)
class Scored:
    """A run with its prediction."""

    run: Run
    prediction: Prediction

    @property
    def error(self) -> float:
        """Of the step time; both times must be there."""
        assert self.prediction.step_s is not None and self.run.iter_time_s is not None
        return self.prediction.step_s / self.run.iter_time_s - 1

    @property
    def memory_error(self) -> float | None:
        """Of the peak, like with like: what is allocated, or reserved."""
        published = self.run.peak_mem_gib
        if published is None or self.prediction.allocated_bytes is None:
            return None
        return self.prediction.allocated_bytes / (published * 2**30) - 1


@dataclass(frozen=True)
class Summary:
    """Errors of some runs, as fractions."""

    num_runs: int
    mean_absolute: float
    bias: float
    worst: float
    """Signed."""

    @classmethod
    def of(cls, errors: Sequence[float]) -> "Summary":
        """Raises ValueError for no errors."""
        if not errors:
            raise ValueError("no runs to sum up")
        absolute = [abs(e) for e in errors]
        return cls(len(errors), mean(absolute), mean(errors), max(errors, key=abs))


def timed(scored: Sequence[Scored]) -> list[Scored]:
    """Those with both times."""
    return [s for s in scored if s.prediction.step_s is not None and s.run.iter_time_s is not None]


def by_dataset(scored: Sequence[Scored]) -> dict[str, list[Scored]]:
    """In order of their names."""
    groups = defaultdict(list)
    for one in scored:
        groups[one.run.dataset].append(one)
    return dict(sorted(groups.items()))


def regrets(scored: Sequence[Scored]) -> list[float]:
    """Of every group of at least LEAST_IN_GROUP plans."""
    groups = defaultdict(list)
    for one in timed(scored):
        run = one.run
        shape = (run.dataset, run.num_layers, run.hidden_size, run.seq_len)
        groups[(*shape, run.num_gpus, run.global_batch_size)].append(one)
    out = []
    for group in groups.values():
        if len(group) >= LEAST_IN_GROUP:
            chosen = min(group, key=lambda s: s.prediction.step_s or 0.0)
            best_s = min(s.run.iter_time_s or 0.0 for s in group)
            out.append((chosen.run.iter_time_s or 0.0) / best_s - 1)
    return out


def yardstick(scored: Sequence[Scored]) -> dict[str, float]:
    """Mean absolute error of the yardstick, by dataset."""
    ratios = [(s.run, r) for s in timed(scored) if (r := _efficiency(s.run)) is not None]
    efficiencies = defaultdict(list)
    for run, ratio in ratios:
        if run.dataset != LEFT_OUT_OF_YARDSTICK:
            efficiencies[family_of(run)].append(ratio)
    constants = {family: median(values) for family, values in efficiencies.items()}
    errors = defaultdict(list)
    for run, ratio in ratios:
        if family_of(run) in constants:
            errors[run.dataset].append(abs(ratio / constants[family_of(run)] - 1))
    return {dataset: mean(values) for dataset, values in errors.items()}


def _efficiency(run: Run) -> float | None:
    ideal = ideal_s(run)
    return None if ideal is None or run.iter_time_s is None else ideal / run.iter_time_s


def ideal_s(run: Run) -> float | None:
    """Seconds of the step at the full peak, with recomputation and bubble."""
    peak = PEAK_TFLOPS.get(family_of(run))
    if run.calc_model_tflops_per_gpu is None or run.iter_time_s is None or peak is None:
        return None
    at_peak_s = run.calc_model_tflops_per_gpu * run.iter_time_s / peak
    recomputed = 4 / 3 if run.recompute == "full" else 1.0
    bubble = 1 + (run.pp - 1) / ((run.vpp or 1) * run.num_microbatches)
    return at_peak_s * recomputed * bubble


def family_of(run: Run) -> str:
    """Of its device: the first word of the name."""
    return run.gpu.split("-")[0]
