"""Cases of files to write: places where none may be written, and disks without space."""

import os
import resource
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from fuzzing.arguments import NOWHERE
from fuzzing.case import Case
from fuzzing.contents import Maker, link
from fuzzing.plans import with_plan
from meshfold.cli.command import INTERRUPTED

NOBODY = 65534
WRITERS: Mapping[str, tuple[str, ...]] = {
    "plan -o": ("plan", NOWHERE, "-c", "local-cpux2", "-o"),
    "check -o": ("check", "plan.json", "--model", NOWHERE, "-o"),
    "timeline --trace": ("timeline", "plan.json", "--trace"),
}


def _socket(path: Path) -> None:
    # The path of a socket is short, so it is made from its folder.
    here = os.getcwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def _hard_link(path: Path) -> None:
    os.link(path.parent / "plan.json", path)


TARGETS: Mapping[str, Maker] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "socket": _socket,
    "link to the null device": link("/dev/null"),
    "link to the full device": link("/dev/full"),
    "link to a folder": link("."),
    "link to itself": link("out.json"),
    "link into no folder": link("nowhere/out.json"),
    "link to the input": link("plan.json"),
    "hard link of the input": _hard_link,
}
NAMES = {
    "null device": "/dev/null",
    "full device": "/dev/full",
    "stdout": "/dev/stdout",
    "a file as folder": "plan.json/out.json",
    "the input": "plan.json",
    "the input by another path": "./../folder/plan.json",
    "no folder": "nowhere/out.json",
    "empty": "",
    "long": "a" * 300,
    "long folder": "a/" * 3000 + "b",
    "folder above": "..",
    "root": "/",
    "processes": "/proc/out.json",
    "devices of processes": "/proc/self/mem",
    "control": "no\x1b[31m/out.json",
    "surrogate": "no\udcff/out.json",
}


def cases() -> Iterator[Case]:
    """Every command that writes with every bad target."""
    for writer, arguments in WRITERS.items():
        # A plan does not read plan.json; it fails for its model.
        for name, target in NAMES.items():
            is_file = name == "stdout"  # of a case
            yield Case(f"{writer} {name}", (*arguments, target), with_plan, may_pass=is_file)
        for name, make in TARGETS.items():
            yield Case(f"{writer} {name}", (*arguments, "out.json"), _beside_a_plan(make))
    trace = WRITERS["timeline --trace"]
    yield Case("no space", (*trace, "out.json"), with_plan, _no_space)
    yield Case("no space over a file", (*trace, "old.json"), _with_old, _no_space)
    yield Case("another's folder", (*trace, "out.json"), _read_only, _nobody)
    yield Case("another's file", (*trace, "old.json"), _with_old_read_only, _nobody)
    yield Case("another's plan", ("show", "old.json"), _with_old_read_only, _nobody)
    yield Case("stdout is full", ("show", "plan.json"), with_plan, _full_stdout)
    yield Case("JSON to a full stdout", ("show", "plan.json", "--json"), with_plan, _full_stdout)
    yield Case("Ctrl-C", ("show", "plan.json"), with_plan, _interrupted, codes=(INTERRUPTED,))


def _no_space() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _full_stdout() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def _interrupted() -> None:
    raise_in = "meshfold.cli.main.load_plan"
    module, _, name = raise_in.rpartition(".")
    main = __import__(module, fromlist=[name])

    def stop(path: object) -> None:
        raise KeyboardInterrupt

    setattr(main, name, stop)


def _nobody() -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def _read_only(folder: Path) -> None:
    with_plan(folder)
    folder.chmod(0o555)


def _with_old(folder: Path) -> None:
    with_plan(folder)
    (folder / "old.json").write_text("old")


def _with_old_read_only(folder: Path) -> None:
    _with_old(folder)
    (folder / "old.json").chmod(0o400)


def _beside_a_plan(make: Maker) -> Maker:
    def prepare(folder: Path) -> None:
        with_plan(folder)
        make(folder / "out.json")

    return prepare
