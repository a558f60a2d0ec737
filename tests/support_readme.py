"""The sessions in README.md, as data. Run as a script, it writes their real output into README.md:

python tests/support_readme.py
"""

import contextlib
import io
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from meshfold.cli.main import run

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
HIDDEN = "[...]\n"
"""Stands for output that README leaves out; the command runs all the same."""
_SESSION = re.compile(r"<!-- session -->\n```console\n(.*?)```\n", re.DOTALL)
_PYTHON = re.compile(r"<!-- python -->\n```python\n(.*?)```\n", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """One command of a session and what it prints."""

    line: str
    output: str

    def __str__(self) -> str:
        return f"$ {self.line}\n{self.output}"


def sessions(text: str) -> list[list[Command]]:
    return [list(_commands(match)) for match in _SESSION.findall(text)]


def python_blocks(text: str) -> list[str]:
    return _PYTHON.findall(text)


def _commands(session: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
        line, _, output = part.partition("\n")
        yield Command(line, output)


def replay(commands: list[Command]) -> list[Command]:
    """The commands with what they print now, in a folder that sees the checkout's examples."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        os.chdir(folder)
        try:
            outputs = [_output(c.line) for c in commands]
        finally:
            os.chdir(before)
    return [
        replace(c, output=HIDDEN if c.output == HIDDEN else output)
        for c, output in zip(commands, outputs, strict=True)
    ]


def _output(line: str) -> str:
    program, *arguments = shlex.split(line)
    assert program == "meshfold", line
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        code = run(arguments)
    assert code == 0, f"{line}: exit code {code}"
    lines = [text.rstrip() for text in stream.getvalue().splitlines()]
    return "\n".join(lines).strip("\n") + "\n"


def main() -> None:
    text = README.read_text(encoding="utf-8")
    for session in _SESSION.findall(text):
        commands = replay(list(_commands(session)))
        text = text.replace(session, "".join(map(str, commands)))
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
