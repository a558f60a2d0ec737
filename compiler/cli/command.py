"""What every command of the command line has in common: --debug, one line for a failure, text on
stdout, and the module that knows torch."""

import importlib
import traceback
from typing import Any

import click

from meshfold.errors import MeshfoldError
from meshfold.report.terminal import escaped_json, escaped_lines

INTERRUPTED = 130
"""Exit code of Ctrl-C."""


class Failure(Exception):
    """An expected end: one line for stderr and an exit code."""

    where = "meshfold"
    """The command that failed."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Command(click.Command):
    """A command with --debug, whose failures are one line and an exit code."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(["--debug"], is_flag=True, help="Show the traceback of a failure.")
        )

    def invoke(self, ctx: click.Context) -> Any:
        debug = ctx.params.pop("debug")
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if debug and not isinstance(error, Failure):
                traceback.print_exc()
            failure = _failure(error)
            failure.where = ctx.command_path
            raise failure from error


def torch_commands() -> Any:
    """meshfold.cli.torch_commands, which takes a second or two to load."""
    return importlib.import_module("meshfold.cli.torch_commands")


def echo(text: str, *, as_json: bool = False) -> None:
    """Prints text of several lines on stdout."""
    click.echo(escaped_json(text) if as_json else escaped_lines(text), nl=False)


def _failure(error: Exception | SystemExit | KeyboardInterrupt) -> Failure:
    """An exception as the line and the exit code that it is for a user."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, MeshfoldError):
        return Failure(str(error), error.exit_code)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return Failure(f"{where}{error.strerror or error}; check the path and the space left", 1)
    if isinstance(error, KeyboardInterrupt):
        return Failure("interrupted", INTERRUPTED)
    if isinstance(error, MemoryError):
        return Failure("out of memory; take a smaller model, batch or plan", 1)
    if isinstance(error, SystemExit):
        return Failure(f"MODEL: its code called sys.exit({error.code!r}); take that out", 1)
    what = f"internal error, {type(error).__name__}: {error}; --debug shows where"
    return Failure(what, 1)
