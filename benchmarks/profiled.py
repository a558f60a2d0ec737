"""Predicted against measured steps on gloo processes of this machine, with its own profile.

    python benchmarks/profiled.py [--processes 2,4] [--minutes 1] [--steps 7] [--plans dp,tp+sp]

Each number of processes is profiled first, as `meshfold profile` does, while all of them work. Then
plans of two small models run: forward and backward, the median of steps from a barrier to the last
rank, after two that are not counted. A row a plan: predicted with the preset local-cpu, with the
profile, and measured; then over all rows of a number of processes the median error of either
prediction, and its rank correlation (Spearman) with what was measured.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

import click
import torch
import torch.distributed as dist
from measuring.here import this_machine
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import meshfold
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.shared_cores import usable_cores, with_turns
from meshfold.distributed.local_processes import Report, run_local
from meshfold.errors import MeshfoldError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.plan_file.cluster_file import cluster_to_json

WARM_UP = 2
SAMPLES, SEQUENCE, VOCABULARY = 4, 64, 512
"""Samples of a process."""
WIDTHS = {"tiny": 64, "small": 256}
LAYERS = 4
HALF = -2
"""As a degree: half of the processes."""
ALL = -1
PLANS: Mapping[str, Mapping[str, int]] = {
    "dp": {"dp": ALL, "zero": 0},
    "zero3": {"dp": ALL, "zero": 3},
    "tp": {"tp": ALL, "sp": 0},
    "tp+sp": {"tp": ALL, "sp": 1},
    "pp2 mb2": {"pp": 2, "dp": HALF, "microbatches": 2},
    "pp2 mb4": {"pp": 2, "dp": HALF, "microbatches": 4},
    "dp mb2": {"dp": ALL, "zero": 0, "microbatches": 2},
    "dp x tp": {"dp": 2, "tp": HALF, "zero": 1},
}


@dataclass(frozen=True)
class Row:
    """Seconds of a step of one plan."""

    name: str
    preset_s: float
    profiled_s: float
    measured_s: float


def build_model(width: int) -> LlamaForCausalLM:
    """The same weights in every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def rows_of_rank(report: Report, minutes: float, steps: int, plans: Sequence[str]) -> list[Row]:
    """On every process; rank 0 reports what it does."""
    size = dist.get_world_size()
    cluster = this_machine(minutes)
    report(cluster_to_json(cluster))
    preset = with_turns(resolve_cluster("local-cpu", size), usable_cores())
    shape = (SAMPLES * size, SEQUENCE)
    tokens = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    rows = []
    for model, width in WIDTHS.items():
        for name in plans:
            pins = {
                axis: size if n == ALL else size // 2 if n == HALF else n
                for axis, n in PLANS[name].items()
            }
            if name == "dp x tp" and size < 4:
                continue
            try:
                row = row_of(f"{model}: {name}", width, batch, pins, (preset, cluster), steps)
            except MeshfoldError as error:
                report(f"{model}: {name}: {error}")
                continue
            rows.append(row)
            report(row)
    return rows


def row_of(
    name: str,
    width: int,
    batch: Mapping[str, Tensor],
    pins: Mapping[str, int],
    clusters: tuple[ClusterSpec, ClusterSpec],
    steps: int,
) -> Row:
    """clusters: the preset, the profile."""
    options = CompileOptions(pins={"microbatches": 1, **pins}, precision="model")
    preset, profiled = (
        meshfold.find_plan(build_model(width), one, batch, options=options) for one in clusters
    )
    made = meshfold.compile(
        build_model(width), clusters[1], batch, plan=profiled, num_compared_batches=0
    )

    def step() -> None:
        made.zero_grad()
        made.train_step(dict(batch))

    measured_s = median_step_s(step, steps)
    made.close()
    return Row(name, step_s(preset), step_s(profiled), measured_s)


def median_step_s(step: Callable[[], object], steps: int) -> float:
    seconds = []
    for _ in range(WARM_UP + steps):
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return median(seconds[WARM_UP:])


def step_s(plan: Plan) -> float:
    """What a plan says of a step without the optimizer."""
    whole = plan.simulated.step_s if plan.simulated else plan.time.step_s
    return whole - plan.time.optimizer_s


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's, of numbers without ties."""
    if len(a) < 2:
        return 1.0
    places = [[sorted(x).index(value) for value in x] for x in (a, b)]
    middle = mean(places[0])
    product = sum((p - middle) * (q - middle) for p, q in zip(*places, strict=True))
    return product / sum((p - middle) ** 2 for p in places[0])


def summary(rows: Sequence[Row]) -> list[str]:
    """A line for the preset and one for the profile."""
    measured = [row.measured_s for row in rows]
    lines = []
    for name in ("preset", "profiled"):
        predicted = [getattr(row, f"{name}_s") for row in rows]
        errors = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
        lines.append(
            f"{name}: median error {median(errors):.0%}, worst {max(errors):.0%}, rank correlation "
            f"{rank_correlation(predicted, measured):.2f}, {len(rows)} plans"
        )
    return lines


def row_text(row: Row) -> str:
    preset, profiled = (s / row.measured_s - 1 for s in (row.preset_s, row.profiled_s))
    return (
        f"{row.name:<18}{1e3 * row.measured_s:9.1f} ms measured{1e3 * row.preset_s:9.1f} by the "
        f"preset ({preset:+.0%}){1e3 * row.profiled_s:9.1f} by the profile ({profiled:+.0%})"
    )


@click.command(help=__doc__)
@click.option("--processes", default="2,4", show_default=True, help="Comma-separated.")
@click.option("--minutes", default=1.0, show_default=True, help="Of each profile.")
@click.option("--steps", default=7, show_default=True)
@click.option("--plans", default=",".join(PLANS), help="Comma-separated.")
def main(processes: str, minutes: float, steps: int, plans: str) -> None:
    unknown = [name for name in plans.split(",") if name not in PLANS]
    if unknown:
        raise click.ClickException(f"no plan {unknown[0]}; there are {', '.join(PLANS)}")

    def tell(rank: int, what: Row | str) -> None:
        if rank == 0:
            click.echo(row_text(what) if isinstance(what, Row) else what, err=isinstance(what, str))

    for count in map(int, processes.split(",")):
        click.echo(f"{count} processes on {usable_cores()} cores")
        rows, *_ = run_local(
            count, rows_of_rank, minutes, steps, plans.split(","), on_report=tell, quiet=True
        )
        for line in summary(rows):
            click.echo(line)


if __name__ == "__main__":
    main()
