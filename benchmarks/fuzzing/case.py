"""One bad input as a case: its files, its command line, and whether the promise was kept.

The promise: one line on stderr, exit code 1 or 2, no 'internal error', in seconds and bounded
memory, nothing written or damaged. A case runs in a forked process with limits of its own.
"""

import contextlib
import os
import resource
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshfold.cli.command import INTERRUPTED
from meshfold.cli.main import main

MOST_CPU_S = 30
MOST_WALL_S = 240
"""On a machine that others use, too."""
MOST_BYTES = 2 * 2**30
MOST_LINE = 2000
WATCHED = 2**20
"""Bytes of a file whose contents are compared."""


def nothing(folder: Path) -> None:
    """A case without files."""


@dataclass(frozen=True)
class Case:
    """A command line in a folder."""

    name: str
    arguments: tuple[str, ...]
    prepare: Callable[[Path], None] = nothing
    """Makes its files in a folder."""
    limit: Callable[[], None] | None = None
    """Called in the process of the case, before it runs."""
    may_pass: bool = False
    """Whether the input may also be right."""
    codes: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class Ending:
    """How a case ended."""

    code: int
    out: str
    err: str
    cpu_s: float
    num_bytes: int
    """That it held beyond what it began with."""


def broken(case: Case) -> list[str]:
    """What the case broke of the promise; nothing if it was kept."""
    with tempfile.TemporaryDirectory() as outside:
        folder = Path(outside, "folder")
        folder.mkdir(mode=0o777)
        os.chmod(outside, 0o777)
        os.chmod(folder, 0o777)
        case.prepare(folder)
        before = _snapshot(folder)
        ending = _run(case, folder, Path(outside))
        faults = _faults(case, ending)
        if ending.code and _snapshot(folder) != before:
            faults.append(f"files changed: {sorted(_snapshot(folder).items() ^ before.items())}")
        faults += [f"{name} is no device" for name in ("/dev/null", "/dev/full") if _lost(name)]
        return faults


def _lost(name: str) -> bool:
    return not stat.S_ISCHR(os.stat(name).st_mode)


def _snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    found = {}
    for path in folder.rglob("*"):
        state = path.lstat()
        content = b""
        if stat.S_ISLNK(state.st_mode):
            content = os.fsencode(os.readlink(path))
        elif stat.S_ISREG(state.st_mode):
            small = state.st_size <= WATCHED
            content = path.read_bytes() if small else str(state.st_size).encode()
        found[str(path.relative_to(folder))] = state.st_mode, content
    return found


def _faults(case: Case, ending: Ending) -> list[str]:
    faults = []
    if ending.cpu_s > MOST_CPU_S:
        faults.append(f"{ending.cpu_s:.0f} s of CPU")
    if ending.num_bytes > MOST_BYTES:
        faults.append(f"{ending.num_bytes / 1e9:.1f} GB")
    if any(c not in "\n" and not c.isprintable() for c in ending.out + ending.err):
        faults.append("a control character in the output")
    if ending.code == 0 and case.may_pass:
        return faults
    if ending.code not in case.codes:
        faults.append(f"exit code {ending.code}")
    line = ending.err
    if line.count("\n") != 1 or not line.endswith("\n") or not line.startswith("meshfold"):
        faults.append(f"{line.count(chr(10))} lines on stderr")
    if len(line) > MOST_LINE + 1:
        faults.append(f"a line of {len(line)} characters")
    if "internal error" in line or "Traceback" in line:
        faults.append("internal error")
    if not (";" in line or "See '" in line or ending.code == INTERRUPTED):
        faults.append("does not say what to do")
    return [f"{fault}: {line[-300:].strip()}" for fault in faults]


def _run(case: Case, folder: Path, outside: Path) -> Ending:
    with open(outside / "out", "w+b") as out, open(outside / "err", "w+b") as err:
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            _become(case, folder, out.fileno(), err.fileno())
        code, usage = _wait(child)
        out.seek(0)
        err.seek(0)
        texts = [f.read().decode("utf-8", "replace") for f in (out, err)]
    cpu_s = usage.ru_utime + usage.ru_stime
    return Ending(code, texts[0], texts[1], cpu_s, max(0, usage.ru_maxrss - held) * 1024)


def _wait(child: int) -> tuple[int, resource.struct_rusage]:
    end = time.monotonic() + MOST_WALL_S
    while time.monotonic() < end:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), usage
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    _, _, usage = os.wait4(child, 0)
    return -signal.SIGKILL, usage


def _become(case: Case, folder: Path, out: int, err: int) -> None:
    """The command `meshfold`, in this process; does not return."""
    code = 99
    try:
        os.chdir(folder)
        for number, target in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
            os.dup2(number, target)
        sys.stdout, sys.stderr = (open(k, "w", encoding="utf-8", closefd=False) for k in (1, 2))
        sys.__stdout__ = sys.stdout  # type: ignore[misc]  # as at the start of a process
        sys.dont_write_bytecode = True
        sys.argv = ["meshfold", *case.arguments]
        sys.path[:] = [p for p in sys.path if p != ""]
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CPU, (2 * MOST_CPU_S, 2 * MOST_CPU_S))
        if case.limit is not None:
            case.limit()
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, AttributeError):
                stream.flush()
        os._exit(code)
