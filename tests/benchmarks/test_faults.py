"""Faults of one rank: what is judged, and a handful of cases as they are run for the table."""

import subprocess
import sys
from pathlib import Path

import faults
import pytest
from faults import Case, RankEnd, verdict

SCRIPT = Path(faults.__file__)
ENDS = {
    "right, 1.0 s": ("late", {0: RankEnd("right", 1.0), 1: RankEnd("right", 0.5)}),
    "line and right, 8.0 s": ("late", {0: RankEnd("right", 1.0), 1: RankEnd("line", 8.0)}),
    "line, 8.0 s": ("dies", {0: RankEnd("line", 8.0)}),
    "FAILS: no end, right": ("late", {0: RankEnd("right", 1.0)}),
    "FAILS: RuntimeError": ("hangs", {0: RankEnd("RuntimeError", 1.0)}),
    "FAILS: wrong": ("other data", {0: RankEnd("wrong", 1.0), 1: RankEnd("wrong", 1.0)}),
    "FAILS: 30 s": ("hangs", {0: RankEnd("line", 30.0)}),
}


@pytest.mark.parametrize("text", ENDS)
def test_a_case_holds_if_all_ranks_end_right_or_in_a_line(text: str) -> None:
    row, ends = ENDS[text]
    assert verdict(Case(row, "dp", "", "", (), 8.0), ends) == text


def test_the_table_counts_the_cases_that_hold() -> None:
    found = {("dies", "dp"): "line, 1.0 s", ("hangs", "dp"): "FAILS: no end"}
    text = faults.table(("dies", "hangs"), ("dp",), found)
    assert text.splitlines()[-1] == "1 of 2 cases hold."
    assert "| hangs | FAILS: no end |" in text


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.rotated(3)
@pytest.mark.parametrize(
    ("rows", "columns"), [("none,dies,late", "zero3"), ("hangs", "dp x tp"), ("too late", "pp")]
)
def test_cases_hold(rows: str, columns: str, tmp_path: Path) -> None:
    written = tmp_path / "faults.md"
    options = ["--rows", rows, "--columns", columns, "--timeout-s", "15", "--write", str(written)]
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False
    )
    count = len(rows.split(","))
    assert ran.returncode == 0, ran.stderr
    assert f"{count} of {count} cases hold." in written.read_text(), ran.stdout
