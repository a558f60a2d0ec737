"""`meshfold explain`: what can be asked, and what is refused."""

from pathlib import Path

import pytest
from support.programs.plans import example_plan

from meshfold.cli.main import run
from meshfold.plan_file.io import save_plan

MODEL = "support.models.factories:regression"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_plan(example_plan(), tmp_path / "plan.json")
    return tmp_path


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--why-not", "tp=2"], "--why-not plans again; say for which model with --model"),
        (["--why-not", "tp=2", "B", "--model", MODEL], "is about the whole plan; leave B out"),
        (["--why-not", "tp", "--model", MODEL], "--why-not tp: no value; write name=value"),
        (["--why-not", "xp=2", "--model", MODEL], "pin 'xp' is unknown"),
        (["--model", MODEL], f"--model {MODEL}: is for --why-not alone; leave it out"),
        (["C"], "no region C in plan.json; it has A, B"),
    ],
)
def test_what_is_refused_is_one_line(
    more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["explain", "plan.json", *more]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""


def test_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", MODEL, "-c", "local-cpux2", "--batch", "8", "-o", "small.json"]
    assert run(command) == 0
    capsys.readouterr()
    assert run(["explain", "small.json", "--why-not", "tp=3", "--model", MODEL]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.startswith("no plan with tp=3: pin tp=3 cannot be kept on 2 devices")
    assert run(["explain", "plan.json", "--why-not", "tp=2", "--model", MODEL]) == 1
    assert "the plan is for LlamaForCausalLM" in capsys.readouterr().err
