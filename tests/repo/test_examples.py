"""The example scripts do what their documents say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.tables import ROOT


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
    assert re.search(r"step predicted [\d.]+ \w+, measured [\d.]+ \w+", out)
    assert (tmp_path / "demo-out" / "plan.json").is_file()
