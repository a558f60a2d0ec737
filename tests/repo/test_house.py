"""House rules that a machine can hold: sizes of files and functions."""

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("compiler", "passes", "cost_models", "tests", "examples", "benchmarks")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def too_long(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    found = [f"{len(text.splitlines())} lines"] if len(text.splitlines()) >= 400 else []
    return found + [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= 50
    ]


# One test of all files: hundreds of tests cost more than what they look at.
def test_sizes() -> None:
    found = {str(path.relative_to(ROOT)): too_long(path) for path in FILES}
    assert {name: long for name, long in found.items() if long} == {}


def test_what_is_too_long_is_found(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    path.write_text("def short():\n    pass\n\n\ndef long():\n" + "    pass\n" * 50)
    assert too_long(path) == ["long: 51 lines"]
    path.write_text("\n" * 400)
    assert too_long(path) == ["400 lines"]


MOST_FILES = 20
MOST_DEPTH = 3


def test_folders_are_small_and_flat() -> None:
    """At most 20 files a folder, 3 folders deep, and every folder of code says what it is for."""
    tops = ("compiler", "passes", "cost_models")
    folders = {path.parent for path in FILES}
    crowded = {str(f): len(list(f.glob("*.py"))) for f in folders}
    assert {f: n for f, n in crowded.items() if n > MOST_FILES} == {}
    assert [f for f in folders if len(f.relative_to(ROOT).parts) > MOST_DEPTH + 1] == []
    code = [f for f in folders if f.relative_to(ROOT).parts[0] in tops]
    assert [f for f in code if len(f.relative_to(ROOT).parts) > MOST_DEPTH] == []
    for folder in code:
        text = (folder / "__init__.py").read_text(encoding="utf-8")
        first = ast.get_docstring(ast.parse(text)) or ""
        assert first.endswith("."), f"{folder}/__init__.py says what the folder is"


TOP = {*FOLDERS, ".ci", "docs", ".gitignore", "constraints.txt", "pyproject.toml", "Makefile"}
TOP |= {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"}
TEXT = {".py", ".md", ".json", ".toml", ".txt", ".typed"}
NO_SUFFIX = {".ci/run", ".gitignore", "LICENSE", "Makefile"}


# What a command leaves behind (a wheel, a plan) is not taken along by `git add -A`.
def test_nothing_but_sources_is_tracked() -> None:
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = [name for name in listed.split("\0") if name and (ROOT / name).exists()]
    assert {name.split("/")[0] for name in names} <= TOP
    assert [n for n in names if Path(n).suffix not in TEXT and n not in NO_SUFFIX] == []
