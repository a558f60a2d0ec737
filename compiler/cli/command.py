"""What every command of the command line has in common: --debug, and one line for a failure."""

import traceback
from typing import Any

import click

from meshfold.errors import MeshfoldError


class Failure(Exception):
    """An expected end: one line for stderr and an exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(" ".join(message.split()))
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
        except (Failure, click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except (MeshfoldError, OSError) as error:
            if debug:
                traceback.print_exc()
            raise Failure(str(error), getattr(error, "exit_code", 1)) from error
        except Exception as error:
            if debug:
                traceback.print_exc()
            what = f"internal error, {type(error).__name__}: {error}; --debug shows where"
            raise Failure(what, 1) from error
