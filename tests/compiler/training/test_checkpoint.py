"""Checkpoints: from plan to plan, and whatever a save that dies leaves behind."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes.checkpoint import goes_on_as_if_nothing_had_been, trained
from support.processes.pool import Pools
from torch.distributed.checkpoint.state_dict_saver import save

import meshfold
from meshfold.errors import MeshfoldError, OptionError

TESTS = Path(__file__).resolve().parents[2]
SCRIPT = "support.processes.checkpoint"


def test_training_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "last"
    for _ in range(2):  # the second one replaces the first
        assert goes_on_as_if_nothing_had_been(str(folder), {}, {}) == 0.0
    assert [f.name for f in folder.parent.iterdir()] == ["last"]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"dp": 2, "zero": 3}, {"tp": 2, "sp": 0}),
        pytest.param({"tp": 2, "sp": 0}, {"pp": 2, "microbatches": 2}, marks=pytest.mark.slow),
    ],
)
def test_from_plan_to_plan(
    pools: Pools, tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    name = "support.processes.checkpoint:goes_on_as_if_nothing_had_been"
    for difference in pools.run(2, name, str(tmp_path / "last"), first, second):
        assert difference < 1e-12


@pytest.mark.parametrize(
    "where", ["writing", *(pytest.param(k, marks=pytest.mark.slow) for k in "01")]
)
def test_a_save_that_is_killed_leaves_the_last_good_one(tmp_path: Path, where: str) -> None:
    folder = str(tmp_path / "last")
    done = subprocess.run([sys.executable, "-m", SCRIPT, folder, where], cwd=TESTS, check=False)
    assert done.returncode == -signal.SIGKILL
    right, _, step = trained()
    step()
    for _ in range(2):
        compiled, optimizer, _ = trained(seed=1)
        meshfold.load_checkpoint(folder, compiled, optimizer)
        assert compiled.num_steps == 1
        for name, x in right.state_dict().items():
            assert torch.equal(compiled.state_dict()[name], x)
        # The next save clears up.
        meshfold.save_checkpoint(folder, compiled, optimizer)
        assert [f.name for f in tmp_path.iterdir()] == ["last"]


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    compiled, optimizer, step = trained()
    with pytest.raises(MeshfoldError, match="nowhere: no checkpoint there; save_checkpoint writes"):
        meshfold.load_checkpoint(tmp_path / "nowhere", compiled)
    meshfold.save_checkpoint(tmp_path / "alone", compiled)
    with pytest.raises(OptionError, match="alone: saved without an optimizer; load the model"):
        meshfold.load_checkpoint(tmp_path / "alone", compiled, optimizer)
    step()
    meshfold.save_checkpoint(tmp_path / "both", compiled, optimizer)
    halves = [{"params": p} for p in compiled.parameters()]
    with pytest.raises(OptionError, match="saved with 1 groups of parameters, this one has 16"):
        meshfold.load_checkpoint(tmp_path / "both", compiled, torch.optim.AdamW(halves))


def test_a_checkpoint_names_nothing_of_ours(tmp_path: Path) -> None:
    """A module of this package may move without breaking what was saved."""
    compiled, optimizer, step = trained()
    step()
    meshfold.save_checkpoint(tmp_path / "last", compiled, optimizer)
    assert not any(b"meshfold" in file.read_bytes() for file in (tmp_path / "last").iterdir())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_optimizer_of_an_older_version_is_refused(tmp_path: Path) -> None:
    compiled, optimizer, _ = trained()
    old = {"optimizer.param_groups": "pickled", "num_steps": 3, **prefixed(compiled.state_dict())}
    save(old, checkpoint_id=tmp_path / "old", no_dist=True)
    with pytest.raises(OptionError, match="saved by an older version; load the model alone"):
        meshfold.load_checkpoint(tmp_path / "old", compiled, optimizer)
    meshfold.load_checkpoint(tmp_path / "old", compiled)
    assert compiled.num_steps == 3


def prefixed(state: dict[str, Any]) -> dict[str, Any]:
    return {f"model.{name}": x for name, x in state.items()}
