"""meshfold delink: a checkpoint of shared layers becomes one of independent layers."""

from pathlib import Path

import click

from meshfold.cli.arguments import FilePath
from meshfold.cli.command import Command, echo, torch_commands
from meshfold.plan_file.io import load_plan
from meshfold.report.terminal import progress


@click.command(cls=Command)
@click.argument("checkpoint", type=FilePath())
@click.option("--plan", "plan_file", type=FilePath(), required=True, help="A plan for --model.")
@click.option("--model", required=True, help="The MODEL with layers of its own at every depth.")
@click.option("--shared", required=True, help="The MODEL of CHECKPOINT, with shared layers.")
@click.option("--output", "-o", type=FilePath(), required=True, help="The folder to write.")
@click.option("--parameters-only", is_flag=True, help="Leave the optimizer out.")
def delink(
    checkpoint: Path,
    plan_file: Path,
    model: str,
    shared: str,
    output: Path,
    parameters_only: bool,
) -> None:
    """Copy the shared layers of CHECKPOINT, and their optimizer states, for each of their uses.

    What is written is a checkpoint of --model, whose first loss is bitwise that of --shared, and
    whose training goes on from its states under any plan. The models differ in nothing else; which
    name is a copy of which follows from the ops that both run. A failure leaves --output as it was.

    \b
    Example:
      meshfold delink saved --plan plan.json --shared my.models:tied --model my.models:own -o out
    """
    plan = load_plan(plan_file)
    with progress(f"copying {checkpoint}"):
        done = torch_commands().delink_checkpoint(
            plan, checkpoint, output, shared=shared, model=model, parameters_only=parameters_only
        )
    states = f"{done.num_states} states of {done.optimizer}" if done.optimizer else "no optimizer"
    echo(f"{output}: {done.num_shared} shared parameters became {done.num_copies}, with {states}\n")
