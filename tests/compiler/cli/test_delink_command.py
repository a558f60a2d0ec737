"""`meshfold delink`: exit codes, and what is said."""

from pathlib import Path

import pytest
from support.processes.checkpoint import trained_deep

import meshfold
from meshfold.cli.main import run

MODEL, SHARED = (f"support.models.factories:deep{name}" for name in ("", "_shared"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan of the model with blocks of its own, and a checkpoint of shared ones."""
    folder = tmp_path_factory.mktemp("delink")
    assert run(["plan", MODEL, "-c", "local-cpux2", "-o", str(folder / "plan.json")]) == 0
    model, optimizer, step = trained_deep("called", {})
    step()
    meshfold.save_checkpoint(folder / "shared", model, optimizer)
    return folder


def delink(folder: Path, *more: str, model: str = MODEL, shared: str = SHARED) -> int:
    plan = ["--plan", str(folder / "plan.json"), "--model", model, "--shared", shared]
    return run(["delink", str(folder / "shared"), *plan, *more])


def test_what_it_says(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert delink(made, "-o", str(tmp_path / "out")) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out == (
        f"{tmp_path}/out: 3 shared parameters became 12, with 48 states of AdamW\n"
    )
    assert delink(made, "-o", str(tmp_path / "bare"), "--parameters-only") == 0
    assert capsys.readouterr().out.endswith("became 12, with no optimizer\n")


def test_exit_codes(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = "-o", str(tmp_path / "out")
    for code, words, found in (
        (2, "nothing is shared", lambda: delink(made, *out, shared=MODEL)),
        (1, "the plan was made for another model", lambda: delink(made, *out, model=SHARED)),
        (2, "Missing option '--output'", lambda: delink(made)),
        (1, "no checkpoint there", lambda: run(_elsewhere(made, tmp_path))),
    ):
        assert found() == code
        captured = capsys.readouterr()
        assert words in captured.err and captured.err.count("\n") == 1
        assert captured.out == "" and not list(tmp_path.iterdir())


def _elsewhere(made: Path, tmp_path: Path) -> list[str]:
    plan = ["--plan", str(made / "plan.json"), "--model", MODEL, "--shared", SHARED]
    return ["delink", str(tmp_path / "none"), *plan, "-o", str(tmp_path / "out")]
