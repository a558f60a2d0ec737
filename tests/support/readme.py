"""What README.md and docs/ show, as data: sessions, python blocks, files, tables.

Marks in a document, each on the line before a fenced block:

    <!-- session -->          commands with their output; <!-- session slow --> starts processes
    <!-- python -->           runs as written; the blocks of one document share their names
    <!-- file cluster.json --> is there under this name when the sessions run

All sessions of a document run in one folder, in order. A line "[...]" in an output stands for lines
that are left out. Run as a script this writes the real outputs into the documents, and the tables
that stand between <!-- table NAME --> and <!-- end -->:

    PYTHONPATH=tests python -m support.readme [FILE ...]
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

from meshfold.cli.main import run
from meshfold.cost_models.hardware import shared_cores
from support.tables import TABLES

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCUMENTS = (
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "configs" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
)
MANY_CORES = 64
"""Sessions are those of a machine with a core for each process."""
HIDDEN = "[...]"
"""Stands for lines of output that a document leaves out; the command runs all the same."""
_SESSION = re.compile(r"(<!-- session( slow)? -->\n```console\n)(.*?)(```\n)", re.DOTALL)
_PYTHON = re.compile(r"<!-- python -->\n```python\n(.*?)```\n", re.DOTALL)
_FILE = re.compile(r"<!-- file (\S+) -->\n```\w+\n(.*?)```\n", re.DOTALL)
_TABLE = re.compile(r"(<!-- table (\S+) -->\n)(.*?)(<!-- end -->\n)", re.DOTALL)
_SHELL = re.compile(r"[|<>&;$`]")


@dataclass(frozen=True)
class Command:
    """One command of a session and what it prints."""

    line: str
    output: str

    def __str__(self) -> str:
        return f"$ {self.line}\n{self.output}"


@dataclass(frozen=True)
class Session:
    """Commands in a row. is_slow: starts processes, or takes long."""

    commands: tuple[Command, ...]
    is_slow: bool

    def __str__(self) -> str:
        return "".join(map(str, self.commands))


def sessions(text: str) -> list[Session]:
    return [Session(tuple(_commands(body)), bool(slow)) for _, slow, body, _ in _found(text)]


def _found(text: str) -> list[tuple[str, str, str, str]]:
    return _SESSION.findall(text)


def python_blocks(text: str) -> list[str]:
    return _PYTHON.findall(text)


def files(text: str) -> dict[str, str]:
    return dict(_FILE.findall(text))


def _commands(session: str) -> Iterator[Command]:
    for shown in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
        line, _, output = shown.partition("\n")
        yield Command(line, output)


@contextlib.contextmanager
def clean_folder(text: str) -> Iterator[None]:
    """Work in a new folder with the files of a document, which sees the checkout's examples."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("examples", "benchmarks"):
            (Path(folder) / name).symlink_to(ROOT / name)
        for name, content in files(text).items():
            (Path(folder) / name).write_text(content, encoding="utf-8")
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def replay(text: str, *, with_slow: bool) -> list[Session]:
    """The sessions of a document with what their commands print now; slow ones as they are unless
    asked for."""
    replayed = []
    cores = mock.patch.object(shared_cores, "usable_cores", lambda: MANY_CORES)
    with clean_folder(text), cores:
        for session in sessions(text):
            if with_slow or not session.is_slow:
                session = replace(session, commands=tuple(_run_all(session.commands)))
            replayed.append(session)
    return replayed


def _run_all(commands: tuple[Command, ...]) -> Iterator[Command]:
    code = 0
    for number, command in enumerate(commands):
        if command.line == "echo $?":
            output = f"{code}\n"
        else:
            output, code = _output(command.line)
            is_asked = [c.line for c in commands[number + 1 : number + 2]] == ["echo $?"]
            assert is_asked or code == 0, f"{command.line}: exit code {code}\n{output}"
        yield replace(command, output=trimmed(output, command.output))


def _output(line: str) -> tuple[str, int]:
    """What a command prints, on both streams, and its exit code."""
    if line.startswith("meshfold ") and not _SHELL.search(line):
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            code = run(shlex.split(line)[1:])
        text = stream.getvalue()
    else:
        done = subprocess.run(
            ["bash", "-c", line],
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        text, code = done.stdout, done.returncode
    lines = "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")
    return f"{lines}\n" if lines else "", code


def trimmed(output: str, shown: str) -> str:
    """`output` without the lines that `shown` leaves out. What follows a "[...]" starts at the next
    line that begins with the same words; as many lines as before are kept, and behind
    the last "[...]" all. Raises AssertionError where no line starts so."""
    lines, kept, at = output.splitlines(), [], 0
    blocks = "".join(shown).split(f"{HIDDEN}\n")
    if len(blocks) == 1:
        return output
    for number, block in enumerate(blocks):
        wanted = block.splitlines()
        if number:
            kept.append(HIDDEN)
        if not wanted:
            continue
        if number:
            starts = [k for k in range(at, len(lines)) if _label(lines[k]) == _label(wanted[0])]
            assert starts, f"no line like {wanted[0]!r} in:\n{output}"
            at = starts[0]
        is_rest = number == len(blocks) - 1
        end = len(lines) if is_rest else at + len(wanted)
        kept += lines[at:end]
        at = end
    return "".join(f"{line}\n" for line in kept)


def _label(line: str) -> str:
    return re.split(r"\s\s|\d", line.strip())[0].strip() or line


def with_tables(text: str) -> str:
    """A document with its tables as the code says now."""
    return _TABLE.sub(lambda m: m[1] + TABLES[m[2]]() + m[4], text)


def rewritten(text: str) -> str:
    """A document with the real output of its sessions and its tables."""
    bodies = iter(replay(text, with_slow=True))
    put: Callable[[re.Match[str]], str] = lambda m: f"{m[1]}{next(bodies)}{m[4]}"  # noqa: E731
    return with_tables(_SESSION.sub(put, text))


def main() -> None:
    for path in [Path(name).resolve() for name in sys.argv[1:]] or DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        path.write_text(rewritten(text), encoding="utf-8")


if __name__ == "__main__":
    main()
