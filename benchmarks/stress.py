"""Models built, stepped and closed over and over on gloo processes, under a fault handler.

    python benchmarks/stress.py [--processes 2] [--builds 1000]

Every build compiles a small Llama in scheduled mode, under one of several strategies in turn, takes
two steps, compares the losses with those of its first build, and gives its process groups back. A
process that dies of a signal leaves its Python stack on stderr and fails the run.
"""

import faulthandler
import itertools
import time

import click
import torch
from overlap import build_model

import meshfold
from meshfold.distributed.local_processes import Report, run_local
from meshfold.ir.options import CompileOptions

LAYERS, WIDTH = 2, 64
STRATEGIES = (
    {"dp": -1, "zero": 3},
    {"tp": -1, "sp": 1},
    {"tp": -1, "sp": 0},
    {"dp": -1, "zero": 0},
    {"dp": -1, "zero": 3, "recompute": "full"},
)
"""Pins; a degree of -1 stands for all processes."""


def build_and_step(report: Report, processes: int, builds: int) -> int:
    """Number of builds whose losses differ from the first under the same pins."""
    faulthandler.enable()
    tokens = torch.arange(64).repeat(2 * processes, 1)
    batch = {"input_ids": tokens, "labels": tokens}
    plans = []
    for pins in STRATEGIES:
        fixed = {name: processes if value == -1 else value for name, value in pins.items()}
        options = CompileOptions(pins={"microbatches": 1, **fixed}, mode="scheduled")
        original = build_model(LAYERS, WIDTH)
        cluster = f"local-cpux{processes}"
        plans.append(meshfold.find_plan(original, cluster, batch, options=options))
    first: dict[int, list[float]] = {}
    differ = 0
    for number, plan in zip(range(builds), itertools.cycle(plans), strict=False):
        model = meshfold.compile(build_model(LAYERS, WIDTH), "local-cpu", batch, plan=plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            losses.append(model.train_step(batch).item())
            optimizer.step()
            optimizer.zero_grad()
        differ += losses != first.setdefault(number % len(plans), losses)
        model.close()
        if number % 50 == 49:
            report(f"{number + 1} of {builds}")
    return differ


@click.command()
@click.option("--processes", default=2, show_default=True)
@click.option("--builds", default=1000, show_default=True)
def main(processes: int, builds: int) -> None:
    """Build, step and close models; exit code 1 where losses differ."""

    def tell(rank: int, what: str) -> None:
        if rank == 0:
            click.echo(what, err=True)

    start = time.perf_counter()
    differ = run_local(processes, build_and_step, processes, builds, on_report=tell, quiet=True)
    minutes = (time.perf_counter() - start) / 60
    click.echo(f"{builds} builds, twice as many steps, {processes} processes: {minutes:.1f} min")
    click.echo(f"{max(differ)} of them with other losses than the first under their strategy")
    raise SystemExit(int(any(differ)))


if __name__ == "__main__":
    main()
