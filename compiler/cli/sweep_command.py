"""The command `sweep`: the best plans over memory, batch or sequence. No torch before it runs."""

from pathlib import Path
from typing import Any

import click

from meshfold.cli.arguments import FilePath, Number, check_output, parse_over
from meshfold.cli.command import Command, Failure, echo, torch_commands
from meshfold.cli.plan_command import PRICE
from meshfold.cli.search_options import CLUSTER, compile_options, search_options, size_options
from meshfold.cost_models.hardware.shared_cores import resolve_here
from meshfold.errors import OptionError
from meshfold.plan_file.output_file import write_whole
from meshfold.report.plan_rows import RowTable, Setting, rows_csv, rows_json, rows_view
from meshfold.report.sweep_bars import SweepBars
from meshfold.report.sweep_svg import sweep_svg
from meshfold.report.terminal import lines_view, print_view, progress


@click.command(cls=Command)
@click.argument("model")
@CLUSTER
@click.option(
    "--over",
    required=True,
    metavar="WHAT=RANGE",
    help="memory=16GB..80GB, batch=64..1024 or seq=2048..32768: doubled up to the end; or a list, "
    "batch=64,96,128.",
)
@click.option("--devices", type=Number(), help="Use that many of the cluster's devices.")
@size_options
@search_options
@PRICE
@click.option("--csv", type=FilePath(), help="Write the rows to a CSV file.")
@click.option("--plot", type=FilePath(), help="Draw them in an SVG file instead of the terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def sweep(
    model: str,
    cluster: str,
    over: str,
    devices: int | None,
    batch: int | None,
    seq: int | None,
    price: float | None,
    csv: Path | None,
    plot: Path | None,
    as_json: bool,
    **search: Any,
) -> None:
    """Find the best plans for MODEL over memory budgets, batch sizes or sequence lengths.

    \b
    Example:
      meshfold sweep examples/configs/llama-3-8b.json -c dgx-h100x2 --over batch=16..256
    """
    name, values = parse_over(over)
    given = {"memory": search["memory"], "batch": batch, "seq": seq}
    if given[name] is not None:
        raise OptionError(f"--{name} {given[name]}: --over {over} says it, too; leave one out")
    check_output("--csv", csv, model, cluster)
    check_output("--plot", plot, model, cluster)
    if csv is not None and plot is not None and csv.resolve() == plot.resolve():
        raise OptionError(f"--plot {plot}: is the file of --csv; name another file")
    options = compile_options(**search)
    spec, notes = resolve_here(cluster, devices)
    count = spec.num_devices
    settings = {
        "memory": lambda x: Setting(count, batch, seq, x),
        "batch": lambda x: Setting(count, x, seq),
        "seq": lambda x: Setting(count, batch, x),
    }
    places = [(spec, settings[name](value)) for value in values]
    with progress(f"capturing {model}") as status:

        def tell(done: int, total: int) -> None:
            status.update(lines_view([f"planning for {spec.name}: {done} of {total}"]))

        rows = torch_commands().make_rows(model, places, options, tell)
    table = RowTable(name, rows, price)
    _write(table, csv, plot, f"{model} on {spec.name}")
    _show(table, notes, draws=plot is None, as_json=as_json)


def _write(table: RowTable, csv: Path | None, plot: Path | None, title: str) -> None:
    if csv is not None:
        write_whole(csv, rows_csv(table))
    if plot is not None:
        write_whole(plot, sweep_svg(table, title))


def _show(table: RowTable, notes: tuple[str, ...], *, draws: bool, as_json: bool) -> None:
    """Print the rows, and as bars where nothing else draws them. Raises Failure without a plan."""
    if as_json:
        echo(rows_json(table, notes), as_json=True)
    else:
        print_view(rows_view(table))
        if draws:
            echo("\n")
            print_view(SweepBars(table))
        if notes:
            print_view(lines_view(["", *notes]))
    if not any(row.figures for row in table.rows):
        raise Failure(f"no plan at any of these points: {table.rows[-1].refusal}", 1)
