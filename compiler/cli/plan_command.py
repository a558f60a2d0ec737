"""The command `plan`: one plan, or with several counts of devices a table of the best on each. No
torch before it runs."""

from pathlib import Path
from typing import Any

import click

from meshfold.cli.arguments import Counts, FilePath, Price, check_output
from meshfold.cli.command import Command, Failure, echo, torch_commands
from meshfold.cli.search_options import CLUSTER, compile_options, search_options, size_options
from meshfold.cost_models.hardware.shared_cores import resolve_here
from meshfold.errors import OptionError
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.plan_file.io import plan_to_json, save_plan
from meshfold.report.plan import summary_view
from meshfold.report.plan_rows import RowTable, Setting, rows_json, rows_view
from meshfold.report.scaling import scaling_lines
from meshfold.report.terminal import lines_view, print_view, progress

PRICE = click.option(
    "--price-per-device-hour",
    "price",
    type=Price(),
    help="In any currency, for what a million tokens cost. [default: device-seconds are shown]",
)


@click.command(cls=Command)
@click.argument("model")
@CLUSTER
@click.option(
    "--devices",
    type=Counts(),
    help="Use that many of the cluster's devices; of several counts, 8..512 (doubled) or 8,24,64, "
    "a table of the best plans is printed.",
)
@size_options
@search_options
@PRICE
@click.option("--output", "-o", type=FilePath(), help="The plan file to write.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan, or the table, as JSON.")
def plan(
    model: str,
    cluster: str,
    devices: tuple[int, ...] | None,
    batch: int | None,
    seq: int | None,
    price: float | None,
    output: Path | None,
    as_json: bool,
    **search: Any,
) -> None:
    """Find the best plan for MODEL on a cluster, show it, and with -o write it to a file.

    MODEL is package.module:factory or path/file.py:factory, where factory() returns (model,
    example_inputs) or (model, example_inputs, loss_fn), or a Hugging Face configuration file.

    \b
    Example:
      meshfold plan examples/configs/llama-3-8b.json -c dgx-h100x2 --batch 32 -o plan.json
      meshfold plan examples/configs/llama-3-8b.json -c dgx-h100 --batch 256 --devices 8..256
    """
    if devices is not None and len(devices) > 1:
        if output is not None:
            raise OptionError(
                f"-o {output}: a file holds one plan, --devices asks for {len(devices)}; leave -o "
                "out, then write the one that you want with its count"
            )
        options = compile_options(**search)
        _give_rows(model, cluster, devices, options, batch, seq, price=price, as_json=as_json)
        return
    if price is not None:
        raise OptionError(
            "--price-per-device-hour is for tables; say --devices 8..64, or use 'meshfold sweep'"
        )
    check_output("-o", output, model, cluster)
    options = compile_options(**search)
    spec, notes = resolve_here(cluster, devices[0] if devices else None)
    with progress(f"capturing {model}") as status:

        def tell(done: int, total: int, label: str) -> None:
            status.update(lines_view([f"planning for {spec.name}: {done} of {total}, {label}"]))

        made = torch_commands().make_plan(
            model, spec, options, batch=batch, sequence=seq, notes=notes, progress=tell
        )
    _give(made, output, as_json=as_json)


def _give(made: Plan, output: Path | None, *, as_json: bool) -> None:
    """Write a plan if it has a file, and show it, or print it as JSON."""
    if output is not None:
        save_plan(made, output)
    if as_json:
        echo(plan_to_json(made), as_json=True)
    else:
        print_view(summary_view(made))
        if output is None:
            echo("\nnot written to a file; the same command with '-o plan.json' keeps it\n")
        else:
            echo(f"\nwritten to {output}; 'meshfold show {output}' has the details\n")


def _give_rows(
    model: str,
    cluster: str,
    devices: tuple[int, ...],
    options: CompileOptions,
    batch: int | None,
    seq: int | None,
    *,
    price: float | None,
    as_json: bool,
) -> None:
    """Print the best plan on each count of devices. Raises Failure where no count has one."""
    resolved = [resolve_here(cluster, count) for count in devices]
    places = [(spec, Setting(spec.num_devices, batch, seq)) for spec, _ in resolved]
    notes = list(dict.fromkeys(note for _, found in resolved for note in found))
    with progress(f"capturing {model}") as status:

        def tell(done: int, total: int) -> None:
            status.update(lines_view([f"planning: {done} of {total} counts of devices"]))

        rows = torch_commands().make_rows(model, places, options, tell)
    table = RowTable("devices", rows, price)
    sizes = [row.setting.batch for row in rows if row.figures and row.setting.batch]
    lines = [*scaling_lines(table, sizes[0] if sizes else batch or max(devices)), *notes]
    if as_json:
        echo(rows_json(table, lines), as_json=True)
    else:
        print_view(rows_view(table))
        print_view(lines_view(["", *lines]))
    if not sizes:
        raise Failure(f"no plan on any of these counts: {rows[-1].refusal}", 1)
