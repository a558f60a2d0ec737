"""What people will try first works: the commands of README.md, the examples."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support_readme import README, ROOT, Command, python_blocks, replay, sessions

TEXT = README.read_text(encoding="utf-8")


def stable(command: Command) -> list[str]:
    """Lines that do not depend on the machine: of a comparison, rounding noise does."""
    lines = command.output.splitlines()
    return [lines[0], lines[-1]] if command.line.startswith("meshfold verify") else lines


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "number",
    # The first plans; those that start processes take a minute.
    [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, len(sessions(TEXT))))],
)
def test_readme_shows_what_its_commands_print(number: int) -> None:
    written = sessions(TEXT)[number]
    replayed = replay(written)
    assert [stable(c) for c in replayed] == [stable(c) for c in written], "run 'make readme'"


@pytest.mark.parametrize("block", python_blocks(TEXT))
def test_readme_code_trains(block: str) -> None:
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    loss = names["loss"]
    assert isinstance(loss, torch.Tensor)
    assert loss.item() < 5.0  # log(256) = 5.5 before training


def test_readme_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert targets
    assert [t for t in targets if not (ROOT / t).exists()] == []


def output_of(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_training_script_gives_the_same_losses_alone_and_under_torchrun() -> None:
    assert len((ROOT / "examples" / "train.py").read_text().splitlines()) <= 80
    script = ["examples/train.py", "--steps", "3"]
    alone = output_of(*script)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    together = output_of(*torchrun, *script)
    assert re.fullmatch(r"one device: loss 5\.\d{4} -> \d\.\d{4}\n", alone)
    assert together.split(":")[0] != "one device"
    assert together.split(":")[1] == alone.split(":")[1]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_lost_stage_costs_one_step_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses are those of a run in which nothing was lost."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(ROOT / "examples" / "resume.py"), "--steps", "4", "--folder"]
    whole = output_of(*torchrun, *script, str(tmp_path / "whole"))
    restarted = [*torchrun, "--max-restarts", "1", *script, str(tmp_path / "lost")]
    lost = output_of(*restarted, "--lose-at", "2")
    assert [line.split(":")[0] for line in whole.splitlines()] == [f"step {k}" for k in range(4)]
    assert lost == whole


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_demo_compares_four_processes_with_one(tmp_path: Path) -> None:
    out = output_of(str(ROOT / "examples" / "demo.py"), "--steps", "3", cwd=tmp_path)
    assert re.search(r"DDP +dp4 .* OOM", out), "plain data parallelism must not fit"
    difference = re.search(r"largest difference of 3 losses: (\S+)", out)
    assert difference is not None
    assert float(difference[1]) < 1e-4
    assert "agree to 1e-10" in out
    assert (tmp_path / "demo-out" / "plan.json").is_file()
