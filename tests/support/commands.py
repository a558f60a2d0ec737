"""The commands that documents name in their text, and whether they would be understood.

A command is a code span, or a line of an ```sh block, that starts with a program that we have:
meshfold, python, torchrun, make, pytest. A code span that starts with "--" is a part of a command
line of meshfold, and "meshfold plan" alone is the name of a command. Words in capitals (MODEL, N)
stand for something of the reader's.
"""

import argparse
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click

from meshfold.cli.arguments import parse_pins
from meshfold.cli.main import cli
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.ir.options import CompileOptions

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("meshfold", "python", "torchrun", "make", ".venv/bin/pytest", "PYTHONPATH=tests")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`([^`]+)`")
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*")


class Parsed(Exception):
    """A script has read its arguments."""


def fences(text: str) -> list[tuple[str, str]]:
    """(language, content) of every fenced block."""
    return _FENCE.findall(text)


def spans(text: str) -> list[str]:
    """Code spans outside of fenced blocks, each on one line."""
    return [" ".join(span.split()) for span in _SPAN.findall(_FENCE.sub("", text))]


def commands(text: str) -> list[str]:
    typed = [
        line.split("  #")[0].strip()
        for language, content in fences(text)
        if language == "sh"
        for line in content.replace("\\\n", " ").splitlines()
        if line.strip() and not line.startswith("#")
    ]
    named = [s for s in spans(text) if s.startswith((*(f"{p} " for p in PROGRAMS), "--"))]
    return typed + named


def check(command: str) -> None:
    """Raises where the command names something that is not there."""
    words = shlex.split(command)
    while "=" in words[0]:
        words = words[1:]
    program = words[0].removeprefix(".venv/bin/")
    if program.startswith("-"):
        check_options(words)
    elif program == "meshfold":
        check_meshfold(words[1:])
    elif program in ("python", "torchrun"):
        check_python(program, words[1:])
    elif program == "make":
        check_make(words[1:])
    elif program == "pytest":
        assert [w for w in words[1:] if "/" in w and not (ROOT / w).exists()] == []
    elif program == "pip":
        check_pip(words[1:])
    else:
        assert program in ("git", "cd", "export", "jq"), f"who knows {program}?"


def check_meshfold(words: list[str]) -> None:
    """Parse a command line of meshfold, with its pins and its cluster."""
    if len(words) == 1 and words[0] in cli.commands:
        return
    if words[0] in cli.commands:
        context = cli.commands[words[0]].make_context(words[0], list(words[1:]))
        check_values(context.params)
    else:
        assert words in (["--version"], ["--help"]), words


def check_values(params: dict[str, Any]) -> None:
    pins = [pin for pin in params.get("pin", ()) if not _is_open(pin.partition("=")[2])]
    mode = "scheduled" if any("micro_chunks" in p for p in pins) else params.get("mode", "eager")
    CompileOptions(pins=parse_pins(tuple(pins)), mode=mode)
    cluster = params.get("cluster")
    if cluster and not _is_open(cluster) and not cluster.endswith(".json"):
        devices = params.get("devices")
        for count in devices if isinstance(devices, tuple) else (devices,):
            resolve_cluster(cluster, count)
    model = params.get("model") or ""
    if model.startswith("examples/"):
        assert (ROOT / model).is_file(), f"no {model}"


def check_options(words: list[str]) -> None:
    """Options of which the text says more: some command takes them all."""
    failures = []
    for name, command in cli.commands.items():
        rest = [*words, *([] if len(words) > 1 or _is_flag(command, words[0]) else ["1"])]
        known = {
            "plan": ["MODEL", "--cluster", "C"],
            "delink": "CHECKPOINT --plan PLAN --model MODEL --shared MODEL -o OUT".split(),
            "diff": ["A", "B"],
            "profile": ["-o", "C.json"],
            "sweep": ["MODEL", "--cluster", "C", "--over", "batch=1..8"],
        }
        needed = known.get(name, ["PLAN"])
        if name in ("check", "graph", "verify") and "--model" not in rest:
            needed = [*needed, "--model", "MODEL"]
        if "--cluster" in rest:
            needed = needed[:1]
        try:
            check_values(command.make_context(name, needed + rest).params)
            return
        except click.exceptions.Exit:  # --help
            return
        except click.UsageError as error:
            failures.append(f"{name}: {error.format_message()}")
    raise AssertionError(f"{words}: {failures}")


def _is_flag(command: click.Command, option: str) -> bool:
    return any(
        isinstance(p, click.Option) and option in p.opts and p.is_flag for p in command.params
    )


def _is_open(word: str) -> bool:
    return _PLACEHOLDER.fullmatch(word) is not None


def check_python(program: str, words: list[str]) -> None:
    """A script is there and takes its arguments."""
    if words[0] == "-m":
        assert words[1] in ("pip", "venv", "torch.distributed.run"), words
        return
    place = next(k for k, word in enumerate(words) if word.endswith(".py"))
    assert program == "torchrun" or place == 0
    script = ROOT / words[place]
    assert script.is_file(), f"no {script}"
    source = script.read_text(encoding="utf-8")
    if "argparse" in source or "@click.command" in source:
        assert arguments_are_read(script, words[place + 1 :]), f"{script} reads no arguments"


def arguments_are_read(script: Path, words: list[str]) -> bool:
    """Run a script up to where it has read its arguments. Raises where it refuses them."""
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        parse(parser, *args, **kwargs)
        raise Parsed

    def invoke(*_: Any) -> Any:
        raise Parsed

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_only),
        mock.patch.object(click.Command, "invoke", invoke),
        mock.patch.object(sys, "argv", [str(script), *words]),
        mock.patch.object(sys, "path", [str(script.parent), str(ROOT / "tests"), *sys.path]),
    ):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except Parsed:
            return True
    return False


def check_make(words: list[str]) -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w+):", text, re.MULTILINE))
    assert {w for w in words if "=" not in w} <= targets, words


def check_pip(words: list[str]) -> None:
    """Extras are those of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extra in re.findall(r"\[(\w+)\]", " ".join(words)):
        assert f"\n{extra} = [" in text, f"no extra {extra}"


def paths(text: str) -> Iterator[str]:
    """Files and folders of the checkout that code spans name."""
    for span in spans(text):
        if re.fullmatch(r"(\w+/)+(\w[\w.-]*\.(py|md|json|toml))?", span):
            yield span
