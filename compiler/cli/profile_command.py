"""The command `profile`: measure this machine and write a cluster file. Neither torch nor numpy
before it runs."""

import contextlib
import importlib
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from meshfold._version import __version__
from meshfold.cli.arguments import FilePath, Number, check_output
from meshfold.cli.command import INTERRUPTED, Command, Failure
from meshfold.cost_models.calibration.points import Profile
from meshfold.cost_models.calibration.points_file import (
    load_profile,
    points_path,
    save_profile,
)
from meshfold.errors import OptionError
from meshfold.plan_file.cluster_file import cluster_to_json, save_cluster
from meshfold.report.terminal import escaped_json, escaped_lines, print_view

MOST_MINUTES = 10.0
SAVE_EVERY_S = 2.0


class Keeper:
    """Keeps what is measured in a file, and shows how far it is."""

    def __init__(self, path: Path, known: Profile | None, bar: Progress) -> None:
        self.path, self.profile, self._bar = path, known, bar
        self.total = 0
        self._saved_s = time.monotonic()
        self._task = bar.add_task("measuring", total=None)

    def tell(self, profile: Profile, total: int) -> None:
        """A point more."""
        self.profile, self.total = profile, total
        self._bar.update(self._task, completed=profile.num_points, total=total)
        if time.monotonic() - self._saved_s >= SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Write what is known."""
        if self.profile is not None:
            save_profile(self.profile, self.path)
            self._saved_s = time.monotonic()


@click.command(cls=Command)
@click.option("--output", "-o", type=FilePath(), required=True, help="The cluster file to write.")
@click.option(
    "--processes",
    type=Number(),
    help="Processes to start and measure at once. [default: one per GPU; without GPUs one per "
    "core, 2 to 4; under torchrun its processes]",
)
@click.option(
    "--minutes",
    type=click.FloatRange(0, MOST_MINUTES, min_open=True),
    help="How long to measure at most. [default: 5; 1 without GPUs]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the cluster file.")
def profile(output: Path, processes: int | None, minutes: float | None, as_json: bool) -> None:
    """Measure this machine and write a cluster file that planning uses.

    Kernels, collectives and both at once are timed on all processes at the same time, and the
    figures of a cluster fitted to that. Points are kept beside the file, in NAME.points.json: when
    it was interrupted (Ctrl-C), or its minutes were over, the same command goes on.

    \b
    Example:
      meshfold profile -o cluster.json
      meshfold plan MODEL --cluster cluster.json -o plan.json
    """
    if output.suffix != ".json":
        raise OptionError(f"-o {output}: a cluster file ends in .json; name it so")
    path = points_path(output)
    check_output("-o", output)
    check_output("-o", path)
    running = importlib.import_module("meshfold.profiling.processes")
    if processes is not None and running.in_job():
        raise OptionError("--processes: the processes of this job are torchrun's; leave it out")
    with _kept(path, is_shown=running.is_first()) as keeper:
        wanted = minutes or running.DEFAULT_MINUTES[running.device_type()]
        if running.in_job():
            keeper.profile = running.profile_job(wanted, keeper.profile, keeper.tell)
        else:
            count = processes if processes is not None else running.default_processes()
            keeper.profile = running.profile_local(count, wanted, keeper.profile, keeper.tell)
    if running.is_first():
        _finish(keeper, output, as_json=as_json)


@contextlib.contextmanager
def _kept(path: Path, *, is_shown: bool) -> Iterator[Keeper]:
    """Keeps the points, whatever ends the measuring."""
    known = load_profile(path) if is_shown and path.exists() else None
    if known is not None and known.finished:
        known = None
    console = Console(stderr=True, quiet=not is_shown)
    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        keeper = Keeper(path, known, bar)
        try:
            yield keeper
        except KeyboardInterrupt as error:
            if keeper.profile is None or not is_shown:
                raise
            count, total = keeper.profile.num_points, keeper.total
            raise Failure(
                f"interrupted; {count} of {total or 'all'} points are in {path}, and the same "
                "command goes on",
                INTERRUPTED,
            ) from error
        finally:
            if is_shown:
                keeper.save()


def _finish(keeper: Keeper, output: Path, *, as_json: bool) -> None:
    assert keeper.profile is not None
    found = cluster_of(keeper.profile, output.stem)
    save_cluster(found.cluster, output)
    if as_json:
        click.echo(escaped_json(cluster_to_json(found.cluster)), nl=False)
        return
    report = importlib.import_module("meshfold.report.profile")
    print_view(report.profile_view(keeper.profile, found))
    lines = [f"written to {output}; 'meshfold plan MODEL --cluster {output} -o plan.json' uses it"]
    if not keeper.profile.finished:
        done = f"{keeper.profile.num_points} of {keeper.total} points"
        lines.append(f"{done} were measured; the same command goes on with the others")
    click.echo(escaped_lines("\n" + "\n".join(lines) + "\n"), nl=False)


def cluster_of(profile: Profile, name: str) -> Any:
    """The cluster of a profile with where it comes from, and the errors of its fit."""
    machine = profile.machine
    source = (
        f"meshfold profile {__version__}, {date.today():%B %Y}, {machine.processes} processes on "
        f"nodes of {machine.cores} cores, torch {machine.torch}"
    )
    fitting = importlib.import_module("meshfold.cost_models.calibration.fitted_cluster")
    return fitting.fitted(profile, name, source)
