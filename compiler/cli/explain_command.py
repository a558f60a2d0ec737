"""The command `explain`: why a plan does what it does, and why not something else. No torch but for
the latter."""

from pathlib import Path

import click

from meshfold.cli.arguments import FilePath, parse_pins
from meshfold.cli.command import Command, torch_commands
from meshfold.errors import OptionError
from meshfold.ir.plan import Plan
from meshfold.plan_file.io import load_plan
from meshfold.report.search import explain_view
from meshfold.report.terminal import lines_view, print_view, progress
from meshfold.report.why_not import why_not_view


@click.command(cls=Command)
@click.argument("plan_file", type=FilePath())
@click.argument("regions", nargs=-1)
@click.option(
    "--why-not",
    "pins",
    multiple=True,
    metavar="NAME=VALUE",
    help="Say what the best plan with this pin costs, and what would have to change for it to win; "
    "repeatable. Needs --model.",
)
@click.option("--model", help="The MODEL that the plan was made for.")
def explain(
    plan_file: Path, regions: tuple[str, ...], pins: tuple[str, ...], model: str | None
) -> None:
    """Say why PLAN_FILE does what it does: per region (all, or those named) the strategy taken and
    the best that lost, with the reason; then the other meshes and what ruled them out. Or why it
    does not keep a pin.

    \b
    Example:
      meshfold explain plan.json B
      meshfold explain plan.json --why-not tp=4 --model examples/configs/llama-3-8b.json
    """
    loaded = load_plan(plan_file)
    if pins:
        _why_not(loaded, regions, pins, model)
        return
    if model is not None:
        raise OptionError(f"--model {model}: is for --why-not alone; leave it out")
    known = {region.name: region for region in loaded.regions}
    unknown = [name for name in regions if name not in known]
    if unknown:
        raise OptionError(f"no region {unknown[0]} in {plan_file}; it has {', '.join(known)}")
    wanted = tuple(known[name] for name in regions or known)
    print_view(explain_view(loaded, wanted))


def _why_not(
    plan: Plan, regions: tuple[str, ...], pins: tuple[str, ...], model: str | None
) -> None:
    if regions:
        raise OptionError(f"--why-not is about the whole plan; leave {regions[0]} out")
    if model is None:
        raise OptionError("--why-not plans again; say for which model with --model")
    try:
        wanted = parse_pins(pins)
    except OptionError as error:
        raise OptionError(str(error).replace("--pin ", "--why-not ", 1)) from error
    with progress("capturing the model") as status:
        answer = torch_commands().answer_why_not(
            plan, model, wanted, lambda text: status.update(lines_view([text]))
        )
    print_view(why_not_view(answer))
