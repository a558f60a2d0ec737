"""What commands that plan ask of a search: options, and the record that they make. No torch."""

from collections.abc import Callable
from typing import Any, get_args

import click

from meshfold.cli.arguments import Number, parse_pins
from meshfold.ir.optimizers import OPTIMIZERS
from meshfold.ir.options import PINS, CompileOptions, ModeChoice, PrecisionChoice
from meshfold.ir.returns import ALL
from meshfold.units import parse_bytes

OFFLOAD, LOW_PRECISION_STATES = "offload", "low_precision_states"

CLUSTER = click.option(
    "--cluster", "-c", required=True, help="Preset (dgx-h100x16@200g, local-cpux4) or file."
)


def size_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """A command with --batch and --seq."""
    batch = click.option(
        "--batch",
        type=Number(),
        help="Global batch size. [default: one sample per device, or per node where that does not "
        "fit]",
    )
    seq = click.option(
        "--seq", type=Number(), help="Sequence length. [default: the model's, at most 2048]"
    )
    return batch(seq(function))


def search_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """A command with the options that compile_options takes."""
    for option in reversed((*_what_runs(), *_what_is_searched(), *_what_is_returned())):
        function = option(function)
    return function


def _what_runs() -> tuple[Callable[..., Any], ...]:
    precision = click.option(
        "--precision",
        type=click.Choice(get_args(PrecisionChoice)),
        default="auto",
        show_default=True,
        help="What ops compute in: the model's own dtypes, or 16 bits with parameters, reductions "
        "of gradients and optimizer states in float32. auto: bf16 on devices that are fast in it, "
        "else model.",
    )
    mode = click.option(
        "--mode",
        type=click.Choice(get_args(ModeChoice)),
        default="auto",
        show_default=True,
        help="How a rank's program runs: as written (eager), or scheduled, compute overlapping "
        "collectives also inside of layers. auto: scheduled where that simulates to a faster step.",
    )
    optimizer = click.option(
        "--optimizer",
        metavar="NAME",
        default="adamw",
        show_default=True,
        help=f"What the training runs, for memory and time: {', '.join(OPTIMIZERS)}.",
    )
    memory = click.option(
        "--memory", help="Budget per device, 16GB or 16GiB. [default: 95 % of its memory]"
    )
    return precision, mode, optimizer, memory


def _what_is_searched() -> tuple[Callable[..., Any], ...]:
    pin = click.option(
        "--pin",
        multiple=True,
        metavar="NAME=VALUE",
        help="Fix a choice; repeatable. "
        + "; ".join(f"{name}: {what}" for name, what in PINS.items())
        + "; layout:NAME: how a parameter is stored (replicate, dp, tp:DIM or tp:DIM,dp; * in NAME "
        "for any text; DIM+ if padded).",
    )
    allow = click.option(
        "--allow",
        type=click.Choice([OFFLOAD, LOW_PRECISION_STATES]),
        multiple=True,
        help=f"Repeatable. {OFFLOAD}: let optimizer states, parameters and activations in the "
        "hosts' memory compete [default: where nothing else fits, or only what is slow]; "
        f"{LOW_PRECISION_STATES}: let AdamW's states in bfloat16 and 8 bits compete [default: "
        "never].",
    )
    without_rule = click.option(
        "--without-rule",
        multiple=True,
        metavar="RULE",
        help="Search without a pruning rule that 'show' names; repeatable.",
    )
    return pin, allow, without_rule


def _what_is_returned() -> tuple[Callable[..., Any], ...]:
    loss = click.option(
        "--loss",
        metavar="PATH",
        help="Where the loss is in what the model returns: losses.box, 1; of several the sum, 'a + "
        "b'. [default: the one scalar that it can be]",
    )
    returned = click.option(
        "--return",
        "returned",
        multiple=True,
        metavar="PATH",
        help="What a step returns besides its loss, all for everything; repeatable.",
    )
    fixed = click.option(
        "--fixed-input",
        multiple=True,
        metavar="NAME",
        help="An integer input whose values are the same in every batch, so that shapes and "
        "branches may depend on them; repeatable.",
    )
    return loss, returned, fixed


def compile_options(
    *,
    precision: PrecisionChoice,
    mode: ModeChoice,
    optimizer: str,
    memory: str | None,
    pin: tuple[str, ...],
    allow: tuple[str, ...],
    without_rule: tuple[str, ...],
    loss: str | None,
    returned: tuple[str, ...],
    fixed_input: tuple[str, ...],
) -> CompileOptions:
    """What the options of search_options ask for. Raises OptionError."""
    return CompileOptions(
        memory_bytes=parse_bytes(memory) if memory is not None else None,
        pins=parse_pins(pin),
        precision=precision,
        mode=mode,
        optimizer=optimizer,
        allow_offload=OFFLOAD in allow,
        allow_low_precision_states=LOW_PRECISION_STATES in allow,
        without_rules=without_rule,
        loss=loss,
        outputs=ALL if ALL in returned else returned,
        fixed_inputs=fixed_input,
    )
