"""`meshfold sweep`: the best plans over memory, batch or sequence."""

import csv
import json
from pathlib import Path

import pytest

from meshfold.cli.main import run

MODEL = "support.models.factories:regression"
COMMAND = ("sweep", MODEL, "-c", "local-cpux2")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_sweep_over_batches(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*COMMAND, "--over", "batch=4..16", "--csv", "s.csv", "--plot", "s.svg"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "█" not in captured.out  # drawn in the file
    with open("s.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["batch"] for row in rows] == ["4", "8", "16"]
    assert all(float(row["step_s"]) > 0 for row in rows)
    assert Path("s.svg").read_text().startswith("<svg")
    assert sorted(p.name for p in Path().iterdir()) == ["s.csv", "s.svg"]


def test_a_sweep_over_memory_draws_bars(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*COMMAND, "--over", "memory=1kB,1GB"]) == 0
    out = capsys.readouterr().out
    assert "1.00 kB  none" in out and "are missing" in " ".join(out.split())
    assert "█" in out.splitlines()[-1]
    assert run([*COMMAND, "--over", "memory=1GB", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["memory_bytes"], row["refusal"]) == (10**9, None)


@pytest.mark.parametrize(
    ("more", "exit_code", "message"),
    [
        (["--over", "tp=1..2"], 2, "write memory=16GB..80GB, batch=64..1024 or seq="),
        (["--over", "batch=1..2", "--batch", "8"], 2, "--batch 8: --over batch=1..2 says it, too"),
        (["--over", "seq=1..2"], 2, "takes no argument 'seq'"),
        (["--over", "memory=1kB,2kB"], 1, "no plan at any of these points: nothing fits"),
        (["--over", "batch=8", "--csv", "no/s.csv"], 2, "--csv no/s.csv: no folder no"),
        (["--over", "batch=8", "--csv", "s", "--plot", "s"], 2, "--plot s: is the file of --csv"),
    ],
)
def test_what_is_refused_is_one_line(
    more: list[str], exit_code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*COMMAND, *more]) == exit_code
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
