"""The command line: plan, show, explain, diff, check, graph, verify, timeline, profile.

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
from typing import Any, NoReturn, get_args

import click

from meshfold._version import __version__
from meshfold.cli.arguments import FilePath, Number, check_output, parse_pins
from meshfold.cli.command import INTERRUPTED, Command, Failure
from meshfold.cli.crash_guard import guarded, say_crash
from meshfold.cli.profile_command import profile
from meshfold.cost_models.hardware.shared_cores import resolve_here
from meshfold.errors import OptionError
from meshfold.ir.options import PINS, CompileOptions, Mode, PrecisionChoice
from meshfold.ir.plan import Plan
from meshfold.ir.returns import ALL
from meshfold.plan_file.io import load_plan, plan_to_json, save_plan
from meshfold.plan_file.output_file import write_whole
from meshfold.report.plan import plan_view, summary_view
from meshfold.report.plan_diff import compare_plans, diff_view, differences_json
from meshfold.report.search import explain_view
from meshfold.report.terminal import (
    error_line,
    escaped_json,
    escaped_lines,
    lines_view,
    print_view,
    progress,
)
from meshfold.units import bytes_text, parse_bytes
from meshfold.validation.report import report_json, report_view


def torch_commands() -> Any:
    """meshfold.cli.torch_commands, which takes a second or two to load."""
    return importlib.import_module("meshfold.cli.torch_commands")


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Plan how a PyTorch model trains on a cluster, look at the plan, prove it."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@cli.command(cls=Command)
@click.argument("model")
@click.option(
    "--cluster", "-c", required=True, help="Preset (dgx-h100x16@200g, local-cpux4) or file."
)
@click.option("--devices", type=Number(), help="Use that many of the cluster's devices.")
@click.option(
    "--batch",
    type=Number(),
    help="Global batch size. [default: one sample per device, or per node where that does not fit]",
)
@click.option("--seq", type=Number(), help="Sequence length. [default: the model's, at most 2048]")
@click.option(
    "--precision",
    type=click.Choice(get_args(PrecisionChoice)),
    default="auto",
    show_default=True,
    help="What ops compute in: the model's own dtypes, or 16 bits with parameters, reductions of "
    "gradients and optimizer states in float32. auto: bf16 on devices that are fast in it, else "
    "model.",
)
@click.option(
    "--mode",
    type=click.Choice(get_args(Mode)),
    default="eager",
    show_default=True,
    help="How a rank's program runs: as written, or scheduled, compute overlapping collectives "
    "also inside of layers.",
)
@click.option("--memory", help="Budget per device, 16GB or 16GiB. [default: 95 % of its memory]")
@click.option(
    "--pin",
    multiple=True,
    metavar="NAME=VALUE",
    help="Fix a choice; repeatable. "
    + "; ".join(f"{name}: {what}" for name, what in PINS.items())
    + "; layout:NAME: how a parameter is stored (replicate, dp, tp:DIM or tp:DIM,dp; * in NAME "
    "for any text; DIM+ if padded).",
)
@click.option(
    "--allow",
    type=click.Choice(["pipelines", "offload", "planned"]),
    help="pipelines: let pipelines compete, which train by train_step. offload: so optimizer "
    "states on hosts. planned: also selective recomputation, offload of activations (run not yet).",
)
@click.option(
    "--without-rule",
    multiple=True,
    metavar="RULE",
    help="Search without a pruning rule that 'show' names; repeatable.",
)
@click.option(
    "--loss",
    metavar="PATH",
    help="Where the loss is in what the model returns: losses.box, 1; of several the sum, 'a + b'. "
    "[default: the one scalar that it can be]",
)
@click.option(
    "--return",
    "returned",
    multiple=True,
    metavar="PATH",
    help="What a step returns besides its loss, all for everything; repeatable.",
)
@click.option("--output", "-o", type=FilePath(), help="The plan file to write.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(
    model: str,
    cluster: str,
    devices: int | None,
    batch: int | None,
    seq: int | None,
    precision: PrecisionChoice,
    mode: Mode,
    memory: str | None,
    pin: tuple[str, ...],
    allow: str | None,
    without_rule: tuple[str, ...],
    loss: str | None,
    returned: tuple[str, ...],
    output: Path | None,
    as_json: bool,
) -> None:
    """Find the best plan for MODEL on a cluster and write it to a file.

    MODEL is package.module:factory, where factory() returns (model, example_inputs) or (model,
    example_inputs, loss_fn), or a Hugging Face configuration file.

    \b
    Example:
      meshfold plan examples/configs/llama-3-8b.json -c dgx-h100x2 --batch 32 -o plan.json
    """
    check_output("-o", output, model, cluster, is_needed=not as_json)
    options = CompileOptions(
        memory_bytes=parse_bytes(memory) if memory is not None else None,
        pins=parse_pins(pin),
        precision=precision,
        mode=mode,
        allow_pipelines=allow == "pipelines",
        allow_offload=allow == "offload",
        allow_planned=allow == "planned",
        without_rules=without_rule,
        loss=loss,
        outputs=ALL if ALL in returned else returned,
    )
    spec, notes = resolve_here(cluster, devices)
    with progress(f"capturing {model}") as status:

        def tell(done: int, total: int, label: str) -> None:
            status.update(lines_view([f"planning for {spec.name}: {done} of {total}, {label}"]))

        made = torch_commands().make_plan(
            model, spec, options, batch=batch, sequence=seq, notes=notes, progress=tell
        )
    _give(made, output, as_json=as_json)


def _give(made: Plan, output: Path | None, *, as_json: bool) -> None:
    """Write a plan and show it, or print it as JSON."""
    if output is not None:
        save_plan(made, output)
    if as_json:
        _echo(plan_to_json(made), as_json=True)
    else:
        print_view(summary_view(made))
        _echo(f"\nwritten to {output}; 'meshfold show {output}' has the details\n")


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
        _echo(plan_to_json(loaded), as_json=True)
    else:
        print_view(plan_view(loaded))


@cli.command(cls=Command)
@click.argument("plan_file", type=FilePath())
@click.argument("regions", nargs=-1)
def explain(plan_file: Path, regions: tuple[str, ...]) -> None:
    """Say why PLAN_FILE does what it does: per region (all, or those named) the strategy taken and
    the best that lost, with the reason; then the other meshes and what ruled them out.

    \b
    Example:
      meshfold explain plan.json B
    """
    loaded = load_plan(plan_file)
    known = {region.name: region for region in loaded.regions}
    unknown = [name for name in regions if name not in known]
    if unknown:
        raise OptionError(f"no region {unknown[0]} in {plan_file}; it has {', '.join(known)}")
    wanted = tuple(known[name] for name in regions or known)
    print_view(explain_view(loaded, wanted))


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
        _echo(differences_json(found), as_json=True)
    else:
        print_view(diff_view(found))
    if found.choices:
        raise Failure(f"{first} and {second} choose differently", 1)


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
        _echo(plan_to_json(priced), as_json=True)
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
    _echo(f"{text}\n")


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
        _echo(report_json(report), as_json=True)
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
    _echo(shown.json, as_json=True) if as_json else _echo(shown.text)


cli.add_command(profile)


def _echo(text: str, *, as_json: bool = False) -> None:
    """Prints text of several lines on stdout."""
    click.echo(escaped_json(text) if as_json else escaped_lines(text), nl=False)


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
