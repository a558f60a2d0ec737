"""Benchmarks of one rank: they find their files, and run."""

import importlib
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from ranks.local_shards import main

ROOT = Path(__file__).parents[2]
WITH_PATHS = [
    str(path.relative_to(ROOT / "benchmarks").with_suffix("")).replace("/", ".")
    for path in sorted((ROOT / "benchmarks").rglob("*.py"))
    if re.search(r"^(CONFIGS?|DEFAULT|NAMED|WITH_MEMORY) = Path", path.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("module", WITH_PATHS)
def test_what_a_benchmark_reads_is_there(module: str) -> None:
    found = vars(importlib.import_module(module))
    paths = [x for name, x in found.items() if isinstance(x, Path) and name.isupper()]
    assert paths and all(path.exists() for path in paths), paths


def test_documents_name_benchmarks_that_are_there() -> None:
    named = {
        name
        for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        for name in re.findall(r"python (benchmarks/[\w/]+\.py)", path.read_text())
    }
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_steps_on_shards_are_timed() -> None:
    result = CliRunner().invoke(main, ["--repeats", "1", "--parameters", "3"])
    assert result.exit_code == 0, result.output
    assert result.output.count("us more each") == 2
