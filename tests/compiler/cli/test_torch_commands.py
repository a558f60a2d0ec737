"""The commands that run a model: plan, graph, verify, from the command line."""

import inspect
import json
from pathlib import Path

import jsonschema
import pytest
import torch
from support.models.factories import Branching, regression

from meshfold.api import find_plan
from meshfold.cli import torch_commands as cli_torch
from meshfold.cli.main import run
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import InfeasibleError
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.plan_file.io import load_plan, save_plan
from meshfold.plan_file.schema import plan_schema
from meshfold.validation.report import TensorDifference, VerifyReport

PASSES = ("emit", "micro_chunks", "collective_matmul", "schedule", "chain", "bucket")
MODEL = "support.models.factories:regression"
BRANCH_LINE = inspect.getsourcelines(Branching.forward)[1] + 2
"""Of the Python branch that cannot be captured."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan of MODEL for two processes."""
    model, inputs = regression()
    return find_plan(model, "local-cpux2", inputs, options=CompileOptions(pins={"tp": 2}))


@pytest.fixture
def plan_file(folder: Path, plan: Plan) -> Path:
    save_plan(plan, folder / "plan.json")
    return folder / "plan.json"


def test_plan_writes_a_valid_file_and_shows_its_top(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", MODEL, "--cluster", "local-cpu", "--devices", "2", "--batch", "12"]
    command += ["--memory", "1GB", "--pin", "tp=2", "--pin", "sp=0", "-o", "plan.json"]
    assert run(command) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "tp2 (pinned: sp=0, tp=2)" in captured.out
    assert "of 1.00 GB" in captured.out
    assert "written to plan.json" in captured.out
    jsonschema.validate(json.loads(Path("plan.json").read_text()), plan_schema())
    assert load_plan("plan.json").model.batch_size == 12
    # The same inputs give the same bytes, in the file and on stdout.
    assert run([*command[:-2], "--json"]) == 0
    assert capsys.readouterr().out.encode() == Path("plan.json").read_bytes()


def test_graph_prints_the_program_of_a_rank(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["graph", "plan.json", "--model", MODEL, "--rank", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("rank 1 of 2 (tp 1) on tp2\n")
    assert "start_all_reduce(context" in out
    assert "wait_all_reduce(context" in out


def test_graph_writes_down_what_each_pass_made(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", MODEL, "--cluster", "local-cpux2", "--pin", "tp=2", "--mode", "scheduled"]
    assert run([*command, "-o", "s.json"]) == 0
    capsys.readouterr()
    folder = tmp_path / "passes"
    assert run(["graph", "s.json", "--model", MODEL, "--passes", str(folder)]) == 0
    out = capsys.readouterr().out
    files = [f"{k}-{name}.txt" for k, name in enumerate(PASSES, 1)]
    assert sorted(path.name for path in folder.iterdir()) == files
    emitted, *_, scheduled = ((folder / name).read_text() for name in files)
    assert scheduled.startswith("pass 6, bucket: ") and scheduled.endswith(out)
    assert "backward: A" in scheduled and "backward: A" not in emitted
    assert run(["graph", "s.json", "--model", MODEL, "--passes", "s.json"]) == 2
    assert "--passes s.json: is a file; name a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (
            ["support.models.factories:nothing"],
            2,
            "module 'support.models.factories' has no function 'nothing'",
        ),
        (["support.models.factories:branching"], 1, f"support/models/factories.py:{BRANCH_LINE})"),
        (["missing.json"], 2, "missing.json: cannot be read"),
        ([MODEL, "--batch", "0"], 2, "--batch 0: no size; write 1 or more"),
        ([MODEL, "--seq", "8"], 2, "takes no argument 'seq'"),
        ([MODEL, "--batch", "7", "--pin", "dp=2"], 2, "a batch of 7 does not divide over dp=2"),
        (
            [MODEL, "--memory", "1kB"],
            1,
            "needs 5.38 kB, most of it activations (1.73 kB); 4.38 kB are missing; use more "
            "devices, more memory or a smaller batch; microbatches and stages were tried, too; "
            "planned again, these would fit: 5.38 kB per device (tp2)",
        ),
        ([MODEL, "--pin", "tp=3"], 2, "tp=3"),
    ],
)
def test_a_failing_plan_is_one_line_and_writes_nothing(
    folder: Path,
    arguments: list[str],
    exit_code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["plan", *arguments, "-c", "local-cpux2", "-o", "plan.json"]) == exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("command", ["graph", "verify"])
def test_a_plan_for_another_model_is_refused(
    command: str, plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = "support.models.factories:classification"
    assert run([command, "plan.json", "--model", other]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "fingerprint" in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.multiprocess
def test_verify_runs_the_plan(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "plan.json", "--model", MODEL, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is True
    assert report["world_size"] == 2
    assert {g["name"] for g in report["gradients"]} == {"up.weight", "up.bias", "down.weight"}


def test_verify_fails_with_the_worst_gradient(
    plan_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients = (TensorDifference("up.bias", 0.5, 0.01, 0.02),)
    report = VerifyReport(2, "tp2", 1.0, 1.0, gradients)
    monkeypatch.setattr(cli_torch, "verify", lambda *_: report)
    assert run(["verify", "plan.json", "--model", MODEL]) == 1
    captured = capsys.readouterr()
    assert "up.bias" in captured.out
    assert captured.err == (
        "meshfold verify: 1 of 1 gradients differ, worst up.bias by 2.0e-02 (tolerance 1e-10); "
        "report it with the plan file\n"
    )


def test_a_batch_that_was_not_asked_for_falls_back_to_one_sample_per_node(
    monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    tried: list[int] = []

    def planned(
        model: object, cluster: object, inputs: dict[str, torch.Tensor], **_: object
    ) -> Plan:
        tried.append(len(inputs["input_ids"]))
        if len(inputs["input_ids"]) > 2:
            raise InfeasibleError("nothing fits", binding_constraint="activations")
        return plan

    monkeypatch.setattr(cli_torch, "find_plan", planned)
    monkeypatch.setattr(cli_torch, "with_remedies", lambda error, *_: error)
    config = str(Path(__file__).parents[3] / "examples/configs/llama-tiny.json")
    spec = resolve_cluster("dgx-h100x2")
    found = cli_torch.make_plan(config, spec, CompileOptions(), batch=None, sequence=None)
    assert tried == [16, 2]
    assert "--batch 2" in found.notes[-1]
    with pytest.raises(InfeasibleError):
        cli_torch.make_plan(config, spec, CompileOptions(), batch=16, sequence=None)
    assert tried == [16, 2, 16]
