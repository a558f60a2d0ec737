"""Large runs that people know by name: the published plan as predicted, beside the plan that the
search chooses for the same model, batch and devices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from meshfold.ir.plan import Plan
from published.predict import captured_shape, fitting, in_framework_s, peak_of, planned
from published.runs import Run, read_runs
from published.setup import setup_of

NAMED = Path(__file__).parent / "named.json"


@dataclass(frozen=True)
class Named:
    """A run and two plans of it. step_s, peak_bytes: of the published plan in its framework."""

    run: Run
    step_s: float
    peak_bytes: float
    capacity_bytes: int
    published: Plan
    chosen: Plan

    @property
    def error(self) -> float:
        """Of the step of the published plan."""
        assert self.run.iter_time_s is not None
        return self.step_s / self.run.iter_time_s - 1


def named_runs(path: Path = NAMED) -> Iterator[Named]:
    """The runs of the file, planned one by one."""
    for run in read_runs(path).runs:
        setup = setup_of(run)
        captured = captured_shape(setup.shape)
        options = replace(setup.options, pins={})
        free = replace(setup, options=options, has_even_stages=False)
        published = fitting(captured, setup)
        yield Named(
            run,
            in_framework_s(published, captured, setup),
            peak_of(published, setup.traits),
            setup.cluster.memory_bytes,
            published,
            planned(captured, free),
        )


def named_table(found: Iterator[Named]) -> None:
    """A row a run, and what both plans spend beyond compute."""
    click.echo(f"{'':<30}{'published':>10}{'predicted':>10}{'error':>8}{'GiB of':>9}{'':>5}")
    for one in found:
        run, gib = one.run, 2**30
        click.echo(
            f"{run.title:<30}{run.iter_time_s:>8.2f} s{one.step_s:>8.2f} s{one.error:>+8.1%}"
            f"{one.peak_bytes / gib:>9.1f}{one.capacity_bytes / gib:>5.0f}"
        )
        for name, plan in (("published", one.published), ("chosen", one.chosen)):
            click.echo(f"    {name:<10}{plan.step_s:>8.2f} s  {spent(plan)}  {label(plan)}")


def spent(plan: Plan) -> str:
    """Where the seconds of an emitted program's step go."""
    time = plan.time
    parts: Sequence[tuple[str, float]] = (
        ("compute", time.forward_s + time.backward_s + time.optimizer_s),
        ("exposed", time.exposed_communication_s),
        ("bubble", time.bubble_s),
    )
    peak = f"{plan.memory.peak / 2**30:.1f} GiB"
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts) + f", {peak}"


def label(plan: Plan) -> str:
    """Its strategy and schedule."""
    return f"{plan.strategy.label}{f' {plan.schedule}' if plan.schedule else ''}"
