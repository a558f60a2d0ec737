"""benchmarks/fuzz.py: there are enough cases, a few of every family keep the promise."""

import os
from pathlib import Path

import pytest
from fuzz import FAMILIES, tables
from fuzzing import arguments, files, outputs
from fuzzing.case import Case, broken

LEAST = 1500
QUICK = {"arguments": arguments.cases, "fields": files.wrong_fields, "outputs": outputs.cases}
TABLES = tables(seed=0)
CASES = [
    (family, case) for family, cases in TABLES.items() if family in QUICK for case in cases[:15]
]


def test_there_are_enough_cases() -> None:
    assert set(TABLES) == set(FAMILIES)
    assert sum(map(len, TABLES.values())) >= LEAST
    assert all(len(cases) > 20 for cases in TABLES.values())


@pytest.mark.parametrize(("family", "case"), CASES, ids=[str(k) for k in range(len(CASES))])
def test_the_promise_is_kept(family: str, case: Case) -> None:
    assert broken(case) == [], f"{family}: {case.name}"


def _write(folder: Path) -> None:
    (folder / "left").touch()


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (Case("passes", ("--version",)), "exit code 0"),
        (Case("another code", ("show", "none.json"), codes=(1,)), "exit code 2"),
        (
            Case("damages", ("show", "none.json"), limit=lambda: _write(Path.cwd())),
            "files changed",
        ),
        (
            Case("prints", ("show", "none.json"), limit=lambda: os.write(2, b"a\n\x1b") and None),
            "lines on stderr",
        ),
    ],
    ids=lambda one: one.name if isinstance(one, Case) else "",
)
def test_a_broken_promise_is_noticed(case: Case, fault: str) -> None:
    assert any(fault in found for found in broken(case))
