"""Arguments of commands: numbers, pins, files to write. No torch."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import click

from meshfold.errors import OptionError
from meshfold.ir.limits import MOST_SIZE
from meshfold.ir.options import PinValue
from meshfold.plan_file.output_file import output_target

_NUMBER = re.compile(r"-?[0-9]{1,18}")


class Number(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A whole number in ASCII digits, at most MOST_SIZE."""

    name = "integer"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | None:
        if isinstance(value, int):
            return value
        if not _NUMBER.fullmatch(value):
            self.fail(f"{value!r} is not a valid integer.", param, ctx)
        if int(value) > MOST_SIZE:
            self.fail(f"{value} is more than {MOST_SIZE}.", param, ctx)
        return int(value)


class FilePath(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A path, of a file that is there or not; click's own fails for what no path can be."""

    name = "path"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path | None:
        try:
            os.stat(value)
        except OSError:
            pass
        except ValueError as error:
            self.fail(f"{value!r} is no path ({error}).", param, ctx)
        return Path(value)


def parse_pins(texts: tuple[str, ...]) -> dict[str, PinValue]:
    """ "tp=2", "recompute=full" -> {"tp": 2, "recompute": "full"}. Raises OptionError."""
    pins: dict[str, PinValue] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not value:
            raise OptionError(f"--pin {text}: no value; write name=value, for example tp=2")
        if name in pins:
            raise OptionError(f"--pin {text}: {name} is pinned twice; leave one out")
        pins[name] = int(value) if _NUMBER.fullmatch(value) else value
    return pins


def check_output(
    option: str, path: Path | None, *inputs: str | Path | None, is_needed: bool = False
) -> None:
    """Refuses a path that cannot be written, before a long search rather than after it. inputs:
    files and MODELs that the command reads; is_needed: what is made goes nowhere else. Raises
    OptionError."""
    if path is None:
        if is_needed:
            raise OptionError(f"nothing to write to; name a file with {option}, or say --json")
        return
    try:
        output_target(path, [file for one in inputs if one for file in _files(str(one))])
    except OptionError as error:
        raise OptionError(f"{option} {error}") from error


def _files(argument: str) -> list[Path]:
    """The file that an argument names, or those of the module of package.module:factory."""
    module = argument.partition(":")[0].replace(".", "/")
    folders = [Path(folder) for folder in dict.fromkeys(("", *sys.path))]
    sources = [f / name for f in folders for name in (f"{module}.py", f"{module}/__init__.py")]
    return [Path(argument), *(sources if ":" in argument else ())]
