"""The command line without a model: help, plan files, and wrong arguments in one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.programs.plans import example_plan

from meshfold.cli.main import cli, run
from meshfold.plan_file.io import plan_to_json, save_plan

COMMANDS = (
    "check",
    "diff",
    "explain",
    "graph",
    "plan",
    "profile",
    "show",
    "sweep",
    "timeline",
    "verify",
)

SEARCH = (
    "--allow",
    "--batch",
    "--cluster",
    "--devices",
    "--fixed-input",
    "--json",
    "--loss",
    "--memory",
    "--mode",
    "--optimizer",
    "--pin",
    "--precision",
    "--price-per-device-hour",
    "--return",
    "--seq",
    "--without-rule",
    "model",
)
"""Of the commands that plan."""


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    save_plan(example_plan(), path)
    return str(path)


def test_the_commands_and_options_are_frozen() -> None:
    """A new option needs a reason: others script against these."""
    options = {
        name: sorted(
            max(p.opts, key=len) for p in cli.commands[name].params if p.name not in ("debug",)
        )
        for name in sorted(cli.commands)
    }
    assert options == {
        "check": ["--json", "--model", "--output", "plan_file"],
        "delink": ["--model", "--output", "--parameters-only", "--plan", "--shared", "checkpoint"],
        "diff": ["--json", "first", "second"],
        "explain": ["--model", "--why-not", "plan_file", "regions"],
        "graph": ["--model", "--passes", "--rank", "plan_file"],
        "plan": sorted([*SEARCH, "--output"]),
        "profile": ["--json", "--minutes", "--output", "--processes"],
        "show": ["--json", "plan_file"],
        "sweep": sorted([*SEARCH, "--csv", "--over", "--plot"]),
        "timeline": ["--json", "--measured", "--model", "--trace", "plan_file"],
        "verify": ["--json", "--model", "plan_file"],
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_a_worked_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"meshfold {command} " in text.split("Example:")[1]
    assert "--debug" in text


def test_without_arguments_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {command} " in out for command in COMMANDS)
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == "0.1.0\n"


def test_show(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", plan_file]) == 0
    captured = capsys.readouterr()
    assert "dp2 x tp4+sp, zero3" in captured.out
    assert captured.err == ""
    assert run(["show", plan_file, "--json"]) == 0
    assert capsys.readouterr().out == plan_to_json(example_plan())


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["bogus"], 2, "No such command 'bogus'"),
        (["show"], 2, "Missing argument 'PLAN_FILE'. See 'meshfold show --help'."),
        (["show", "missing.json"], 2, "missing.json: cannot be read (No such file"),
        (["show", "empty.json"], 2, "empty.json: not JSON"),
        (["show", "old.json"], 2, "old.json: version: found 0, this meshfold reads 2"),
        (["graph", "old.json", "--model", "m:f"], 2, "version: found 0"),
        (["verify", "empty.json", "--model", "m:f"], 2, "empty.json: not JSON"),
        (["graph", "plan.json", "--model", "m:f", "--rank", "8"], 2, "has ranks 0 to 7"),
        (["graph", "plan.json", "--model", "m:f", "--rank", "-1"], 2, "has ranks 0 to 7"),
        (["graph", "plan.json", "--model", "m:f", "--rank", "x"], 2, "'x' is not a valid integer"),
        (["plan", "m:f", "-o", "p.json"], 2, "Missing option '--cluster'"),
        (["plan", "m:f", "-c", "dgx-h10", "-o", "p.json"], 2, "did you mean dgx-h100?"),
        (["plan", "m:f", "-c", "no.json", "-o", "p.json"], 2, "no.json: cannot be read"),
        (["plan", "m:f", "-c", "dgx-h100", "--devices", "0", "-o", "p.json"], 2, "got 0"),
        (["plan", "m:f", "-c", "dgx-h100", "--devices", "-4", "-o", "p.json"], 2, "got -4"),
        (["plan", "m:f", "-c", "dgx-h100", "--devices", "9", "-o", "p.json"], 2, "devices"),
        (["plan", "m:f", "-c", "dgx-h100", "-o", "no/p.json"], 2, "no folder no; make it first"),
        (["plan", "m:f", "-c", "dgx-h100", "-o", "."], 2, "-o .: is a folder"),
        (["plan", "m:f", "-c", "dgx-h100", "-o", "p.json", "--memory", "16"], 2, "16GB or 16GiB"),
        (
            ["plan", "m:f", "-c", "dgx-h100", "-o", "p.json", "--memory", "0GB"],
            2,
            "write more than 0",
        ),
        (
            ["plan", "m:f", "-c", "dgx-h100", "-o", "p.json", "--pin", "tp"],
            2,
            "--pin tp: no value; write",
        ),
        (["plan", "m:f", "-c", "dgx-h100", "-o", "p.json", "--pin", "xp=2"], 2, "pin 'xp' is unk"),
        (["plan", "m:f", "-c", "dgx-h100", "-o", "p.json", "--pin", "tp=0"], 2, "1 or more"),
        (
            ["plan", "m:f", "-c", "dgx-h100", "-o", "p.json", "--pin", "tp=2", "--pin", "tp=4"],
            2,
            "tp is pinned twice",
        ),
    ],
)
def test_a_failure_is_one_line_and_writes_nothing(
    plan_file: str,
    arguments: list[str],
    exit_code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(plan_file).parent
    monkeypatch.chdir(folder)
    (folder / "empty.json").touch()
    (folder / "old.json").write_text(json.dumps({"version": 0}))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert run(arguments) == exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_debug_adds_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", str(tmp_path / "missing.json"), "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("meshfold show: ")


def test_show_does_not_import_torch(plan_file: str) -> None:
    code = (
        "import sys; from meshfold.cli.main import run; "
        f"assert run(['show', {plan_file!r}]) == 0; "
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_reader_that_leaves_early_is_no_crash(plan_file: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [
        sys.executable,
        "-c",
        "from meshfold.cli.main import main; main()",
        "show",
        plan_file,
    ]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_full_stdout_is_one_line(plan_file: str) -> None:
    code = "from meshfold.cli.main import main; main()"
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", code, "show", plan_file]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("meshfold") and done.stderr.count("\n") == 1
    assert "No space left on device; " in done.stderr
