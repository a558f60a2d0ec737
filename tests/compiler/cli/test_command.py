"""What exceptions are for a user: a line that names the command, and an exit code."""

import click
import pytest

from meshfold.cli.command import Command, Failure
from meshfold.errors import InfeasibleError, OptionError


@pytest.mark.parametrize(
    ("error", "message", "exit_code"),
    [
        (OptionError("a: b; c"), "a: b; c", 2),
        (InfeasibleError("a", binding_constraint=""), "a", 1),
        (Failure("a: b", 1), "a: b", 1),
        (OSError(28, "No space left", "p.json"), "p.json: No space left; check the path", 1),
        (KeyboardInterrupt(), "interrupted", 130),
        (MemoryError(), "out of memory; take a smaller", 1),
        (SystemExit(0), "MODEL: its code called sys.exit(0); take that out", 1),
        (KeyError("ours"), "internal error, KeyError: 'ours'; --debug shows where", 1),
    ],
)
def test_every_exception_is_a_failure(error: BaseException, message: str, exit_code: int) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(Failure) as caught:
        Command("some", callback=fail).main([], "some", standalone_mode=False)
    assert str(caught.value).startswith(message)
    assert (caught.value.exit_code, caught.value.where) == (exit_code, "some")


@pytest.mark.parametrize("error", [click.UsageError("a"), click.Abort(), BrokenPipeError()])
def test_what_is_told_elsewhere_passes(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        Command("some", callback=fail).main([], "some", standalone_mode=False)
