"""`meshfold plan`: one plan with and without a file, a table for several counts of devices."""

import json
from pathlib import Path

import pytest

from meshfold.cli.main import run

MODEL = "support.models.factories:regression"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_plan_without_a_file_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", MODEL, "-c", "local-cpu", "--batch", "8"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.endswith(
        "not written to a file; the same command with '-o plan.json' keeps it\n"
    )
    assert not list(folder.iterdir())


def test_several_counts_of_devices_make_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", MODEL, "-c", "local-cpu", "--batch", "8", "--devices", "1..4"]
    assert run(command) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[0].split() == [
        "devices",
        "plan",
        "step",
        "samples/s",
        "MFU",
        "peak",
        "gap",
        "cost",
    ]
    assert [line.split()[0] for line in lines[1:4]] == ["1", "2", "4"]
    assert "fewest devices with a plan: 1, the fewest asked for" in captured.out
    assert run([*command, "--json", "--price-per-device-hour", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["devices"] for row in found["rows"]] == [1, 2, 4]
    for row in found["rows"]:
        cost = row["device_s_per_million"] / 3600 * 2
        assert row["price_per_million"] == pytest.approx(cost)


def test_counts_with_and_without_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Three ranks cannot share a batch of 8 where tp is pinned to 1, nor be stages of one pass."""
    command = ["plan", MODEL, "-c", "local-cpu", "--batch", "8", "--devices", "2,3"]
    assert run([*command, "--pin", "tp=1", "--pin", "microbatches=1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "3 none" in out
    assert "devices 3: a batch of 8 does not divide over dp=3" in out
    assert "a batch of 8 does not divide over 3 devices: data parallelism takes at most 1" in out


@pytest.mark.parametrize(
    ("more", "exit_code", "message"),
    [
        (["--devices", "1..4", "-o", "p.json"], 2, "a file holds one plan, --devices asks for 3"),
        (["--devices", "4..1"], 2, "4..1: no range; write the smaller first"),
        (["-o", "p.json", "--price-per-device-hour", "2"], 2, "is for tables; say --devices 8..64"),
        (["--devices", "1,2", "--pin", "tp=5"], 1, "no plan on any of these counts: pin tp=5"),
        (["--devices", "1,2", "--seq", "5"], 2, "takes no argument 'seq'"),
    ],
)
def test_what_is_refused_is_one_line(
    more: list[str],
    exit_code: int,
    message: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["plan", MODEL, "-c", "local-cpu", *more]) == exit_code
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert list(folder.iterdir()) == []


def test_counts_that_a_cluster_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", MODEL, "-c", "dgx-h100x2", "--devices", "8..32"]) == 2
    assert "devices: 32 asked for, cluster dgx-h100x2 has 16" in capsys.readouterr().err
