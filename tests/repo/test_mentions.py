"""Modules and files that docstrings, comments and documents mention exist."""

import re
from collections.abc import Iterator
from pathlib import Path

from repo.test_layers import MODULES, ROOT

FOLDERS = ("compiler", "passes", "cost_models", "tests", "benchmarks", "examples", "docs")
FILES = sorted(
    path
    for where in (ROOT, *(ROOT / folder for folder in FOLDERS))
    for path in (where.glob("*.md") if where == ROOT else where.rglob("*"))
    # The change log tells of files as they were.
    if path.suffix in (".py", ".md") and path.name != "CHANGELOG.md"
)
TOPS = ("compiler", "passes", "cost_models")
PACKAGES = {module.rpartition(".")[0] for module in MODULES} | {"meshfold"}
MODULE = re.compile(r"(?<!ops\.)\bmeshfold((?:\.[a-z]\w*)+)")
PATH = re.compile(r"(?<![\w/.\-<}*])((?:[a-z]\w*/)+\w+\.py)\b")
SUPPORT = re.compile(r"\bsupport((?:\.[a-z]\w*)+)")


def missing(text: str, folder: Path) -> Iterator[str]:
    for match in MODULE.finditer(text):
        if not exists(match[0]):
            yield match[0]
    for match in PATH.finditer(text):
        tops = (ROOT, *(ROOT / top for top in TOPS), ROOT / "tests", folder)
        if not any((top / match[1]).is_file() for top in tops):
            if not match[1].endswith(("/no_such_file.py", "path/file.py", "mine/models.py")):
                yield match[1]
    for match in SUPPORT.finditer(text):
        path = ROOT / "tests" / match[0].replace(".", "/")
        found = (path, path.with_suffix(".py"), path.parent.with_suffix(".py"))
        if not any(p.exists() for p in found):
            yield match[0]


def exists(name: str) -> bool:
    """Whether it is a module, a folder, a name that its module's text has, or a torch op."""
    if name in MODULES or name in PACKAGES or name.endswith(".default"):
        return True
    module, _, attribute = name.rpartition(".")
    if module in PACKAGES and module not in MODULES:
        return False
    if module in MODULES:
        return re.search(rf"\b{attribute}\b", MODULES[module].read_text("utf-8")) is not None
    return "." in module and exists(module)


# One test of all files: hundreds of tests cost more than what they look at.
def test_what_is_mentioned_exists() -> None:
    found = {
        str(path.relative_to(ROOT)): set(missing(path.read_text(encoding="utf-8"), path.parent))
        for path in FILES
    }
    assert {name: names for name, names in found.items() if names} == {}
