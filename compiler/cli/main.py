"""The command line: plan, sweep, show, explain, diff, check, graph, verify, timeline, delink,
profile.

Exit codes: 0 done, 1 expected failure (nothing fits, plan and model differ, numbers differ),
2 usage or a bad file. A failure is one line on stderr and leaves no file behind; --debug adds the
traceback. Results go to stdout, progress to stderr and only to a terminal.

This module imports no torch: `show`, `explain`, `diff` and `--help` answer at once. What runs a
model is in meshfold.cli.torch_commands, loaded by name when a command needs it.
"""

import importlib
import io
import logging
import sys
import warnings
from pathlib import Path
from typing import NoReturn

import click

from meshfold._version import __version__
from meshfold.cli.arguments import FilePath, Number, check_output
from meshfold.cli.command import INTERRUPTED, Command, Failure, echo, torch_commands
from meshfold.cli.crash_guard import guarded, say_crash
from meshfold.cli.delink_command import delink
from meshfold.cli.explain_command import explain
from meshfold.cli.plan_command import plan
from meshfold.cli.profile_command import profile
from meshfold.cli.sweep_command import sweep
from meshfold.errors import OptionError
from meshfold.plan_file.io import load_plan, plan_to_json, save_plan
from meshfold.plan_file.output_file import write_whole
from meshfold.report.plan import plan_view
from meshfold.report.plan_diff import compare_plans, diff_view, differences_json
from meshfold.report.terminal import error_line, print_view, progress
from meshfold.units import bytes_text
from meshfold.validation.report import report_json, report_view


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Plan how a PyTorch model trains on a cluster, look at the plan, prove it."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@cli.command(cls=Command)
@click.argument("plan_file", type=FilePath())
@click.option("--json", "as_json", is_flag=True, help="Print the checked plan as JSON.")
def show(plan_file: Path, as_json: bool) -> None:
    """Show PLAN_FILE: strategy, predicted step time and memory, baselines, regions, layouts.

    \b
    Example:
      meshfold show plan.json
      meshfold show plan.json --json | jq .memory
    """
    loaded = load_plan(plan_file)
    if as_json:
        echo(plan_to_json(loaded), as_json=True)
    else:
        print_view(plan_view(loaded))


@cli.command(cls=Command)
@click.argument("first", type=FilePath())
@click.argument("second", type=FilePath())
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON.")
def diff(first: Path, second: Path, as_json: bool) -> None:
    """Compare two plans: what they choose, what that costs, layer by layer. Exit code 1 when they
    choose differently.

    \b
    Example:
      meshfold diff before.json after.json
    """
    found = compare_plans(load_plan(first), load_plan(second))
    if as_json:
        echo(differences_json(found), as_json=True)
    else:
        print_view(diff_view(found))
    if found.choices:
        raise Failure(
            f"{first} and {second} choose differently; 'meshfold explain' says why each does", 1
        )


@cli.command(cls=Command)
@click.argument("plan_file", type=FilePath())
@click.option("--model", required=True, help="The MODEL that the plan is for.")
@click.option("--output", "-o", type=FilePath(), help="Write it with new figures.")
@click.option("--json", "as_json", is_flag=True, help="Print the priced plan as JSON.")
def check(plan_file: Path, model: str, output: Path | None, as_json: bool) -> None:
    """Price PLAN_FILE anew, as after editing it by hand: every type is held against the rules, step
    time and peak memory are computed again. Exit code 1 when it does not fit.

    \b
    Example:
      meshfold check edited.json --model examples/configs/llama-3-8b.json -o priced.json
    """
    check_output("-o", output, plan_file, model)
    loaded = load_plan(plan_file)
    with progress(f"pricing {plan_file}"):
        priced = torch_commands().check_plan(loaded, model)
    if output is not None:
        save_plan(priced, output)
    if as_json:
        echo(plan_to_json(priced), as_json=True)
    else:
        print_view(diff_view(compare_plans(loaded, priced)))
    memory = priced.memory
    if not memory.fits:
        missing = bytes_text(memory.peak - memory.capacity)
        raise Failure(f"{plan_file} does not fit: {missing} are missing", 1)


@cli.command(cls=Command)
@click.argument("plan_file", type=FilePath())
@click.option("--model", required=True, help="The MODEL that the plan was made for.")
@click.option("--rank", type=Number(), default=0, show_default=True, help="Whose program to print.")
@click.option("--passes", type=FilePath(), help="A folder for what passes made.")
def graph(plan_file: Path, model: str, rank: int, passes: Path | None) -> None:
    """Print the program of one rank: its graph with every collective, started and waited for.

    With --passes also write the program behind each pass to a folder, numbered, with its seconds.

    \b
    Example:
      meshfold graph plan.json --model examples/configs/llama-3-8b.json --rank 3
    """
    loaded = load_plan(plan_file)
    if not 0 <= rank < loaded.world_size:
        raise OptionError(f"--rank {rank}: the plan has ranks 0 to {loaded.world_size - 1}")
    with progress(f"writing the program of rank {rank} of {loaded.world_size}"):
        text = torch_commands().program_text(loaded, model, rank, passes, (plan_file, Path(model)))
    echo(f"{text}\n")


@cli.command(cls=Command)
@click.argument("plan_file", type=FilePath())
@click.option("--model", required=True, help="The MODEL that the plan was made for.")
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def verify(plan_file: Path, model: str, as_json: bool) -> None:
    """Prove PLAN_FILE: run it on local processes and compare with the model in one process.

    Loss, every gradient, and parameters after steps of the optimizer are compared in float64, on
    the batch the plan was made for, with dropout switched off; and the collectives of all ranks.
    Of a model that this machine cannot run, a scaled-down one is. Exit code 1 when they differ.

    \b
    Example:
      meshfold verify plan.json --model my_package.models:small_llama
    """
    loaded, commands = load_plan(plan_file), torch_commands()
    with progress(f"running {loaded.world_size} processes and the model alone"):
        report = commands.verify_plan(loaded, model)
    if as_json:
        echo(report_json(report), as_json=True)
    else:
        print_view(report_view(report))
    if not report.passed:
        raise Failure(report.verdict, 1)


@cli.command(cls=Command)
@click.argument("plan_file", type=FilePath())
@click.option("--trace", type=FilePath(), help="Write a Chrome trace (Perfetto).")
@click.option("--json", "as_json", is_flag=True, help="Print what runs when as JSON.")
@click.option("--measured", is_flag=True, help="Run it on local processes; needs --model.")
@click.option("--model", help="The MODEL that the plan was made for.")
def timeline(
    plan_file: Path, trace: Path | None, as_json: bool, measured: bool, model: str | None
) -> None:
    """Show what PLAN_FILE runs when: compute, collectives and memory, or a pipeline's microbatches.

    \b
    Example:
      meshfold timeline plan.json --measured --model examples/configs/llama-tiny.json
    """
    check_output("--trace", trace, plan_file, model)
    plan = load_plan(plan_file)
    if measured:
        with progress("running the plan on local processes"):
            shown = torch_commands().measured_timeline(plan, model, trace)
    else:  # loads numpy, which no other command needs
        shown = importlib.import_module("meshfold.report.step_timeline").timeline_of(plan)
    if trace is not None:
        write_whole(trace, shown.trace)
    echo(shown.json, as_json=True) if as_json else echo(shown.text)


cli.add_command(delink)
cli.add_command(explain)
cli.add_command(plan)
cli.add_command(profile)
cli.add_command(sweep)


def run(args: list[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    try:
        code = cli.main(args=args, prog_name="meshfold", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "meshfold"
        message, code = f"{where}: {error.format_message()} See '{where} --help'.", error.exit_code
    except Failure as error:
        message, code = f"{error.where}: {error}", error.exit_code
    except (click.Abort, KeyboardInterrupt):
        message, code = "meshfold: interrupted", INTERRUPTED
    except OSError as error:
        # Of our stdout. Its reader has gone, as in `meshfold show plan.json | head`, or it is full.
        sys.stdout = None  # nothing to flush at exit
        if isinstance(error, BrokenPipeError):
            return 1
        message, code = f"meshfold: stdout: {error.strerror}; make space or write elsewhere", 1
    click.echo(error_line(message), err=True)
    try:
        click.echo(nl=False)  # flushes
    except OSError:
        sys.stdout = None
    return code


def main() -> NoReturn:
    """The `meshfold` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for a terminal that is not UTF-8
    if "--debug" not in sys.argv:  # one line on stderr is the contract; libraries are chatty
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
    sys.exit(guarded(run, say_crash, debug="--debug" in sys.argv))
