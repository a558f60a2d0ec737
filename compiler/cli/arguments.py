"""Arguments of commands: numbers, ranges, pins, files to write. No torch."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from meshfold.errors import OptionError
from meshfold.ir.limits import MOST_SIZE
from meshfold.ir.options import PinValue
from meshfold.plan_file.output_file import output_target
from meshfold.units import parse_bytes

_NUMBER = re.compile(r"-?[0-9]{1,18}")
_PRICE = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


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


def check_output(option: str, path: Path | None, *inputs: str | Path | None) -> None:
    """Refuses a path that cannot be written, before a long search rather than after it. inputs:
    files and MODELs that the command reads. Raises OptionError."""
    if path is None:
        return
    try:
        output_target(path, [file for one in inputs if one for file in _files(str(one))])
    except OptionError as error:
        raise OptionError(f"{option} {error}") from error


def _files(argument: str) -> list[Path]:
    """The file that an argument names, or those of the module of a factory."""
    module, colon, _ = argument.partition(":")
    if colon and module.endswith(".py"):
        return [Path(argument), Path(module)]
    module = module.replace(".", "/")
    folders = [Path(folder) for folder in dict.fromkeys(("", *sys.path))]
    sources = [f / name for f in folders for name in (f"{module}.py", f"{module}/__init__.py")]
    return [Path(argument), *(sources if colon else ())]


MOST_POINTS = 64
"""Of a range or a list."""


def read_points(text: str, read: Callable[[str], int]) -> tuple[int, ...]:
    """ "8..100" -> 8, 16, 32, 64, 100: doubled up to the end, which is always one; "24,8" -> 8, 24;
    "8" -> 8. In rising order, each once. read: reads one of them. Raises OptionError."""
    first, dots, last = text.partition("..")
    if not dots:
        found = sorted({read(word.strip()) for word in text.split(",")})
    else:
        start, end = read(first.strip()), read(last.strip())
        if not 0 < start <= end:
            raise OptionError(f"{text}: no range; write the smaller first, as 8..64")
        found = []
        while start < end:
            found.append(start)
            start *= 2
        found.append(end)
    if len(found) > MOST_POINTS:
        raise OptionError(f"{text}: more than {MOST_POINTS} points; write fewer")
    return tuple(found)


def read_number(text: str) -> int:
    """A whole number in ASCII digits, from 1 to MOST_SIZE. Raises OptionError."""
    if not _NUMBER.fullmatch(text) or not 1 <= int(text) <= MOST_SIZE:
        raise OptionError(f"{text!r} is no whole number from 1 to {MOST_SIZE}; write one, as 64")
    return int(text)


class Counts(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A whole number, several (8,24,64), or a range that doubles (8..512)."""

    name = "N | N,N | N..N"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...] | None:
        if isinstance(value, tuple):
            return value
        if "," not in value and ".." not in value:
            number = Number().convert(value, param, ctx)
            return None if number is None else (number,)
        try:
            return read_points(value, read_number)
        except OptionError as error:
            self.fail(f"{error}.", param, ctx)


class Price(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """An amount of money above 0."""

    name = "price"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | None:
        if isinstance(value, float):
            return value
        if not _PRICE.fullmatch(value) or not float(value):
            self.fail(f"{value!r} is no price above 0; write one, as 2.50.", param, ctx)
        return float(value)


def parse_over(text: str) -> tuple[str, tuple[int, ...]]:
    """ "memory=16GB..64GB" -> ("memory", (16e9, 32e9, 64e9)); memory, batch or seq. Raises
    OptionError."""
    name, _, points = text.partition("=")
    readers = {"memory": parse_bytes, "batch": read_number, "seq": read_number}
    if name not in readers or not points:
        raise OptionError(
            f"--over {text}: cannot be swept; write memory=16GB..80GB, batch=64..1024 or "
            "seq=2048..32768, or a list behind the ="
        )
    try:
        return name, read_points(points, readers[name])
    except OptionError as error:
        raise OptionError(f"--over {error}") from error
