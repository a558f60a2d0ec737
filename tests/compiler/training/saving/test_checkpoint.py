"""Checkpoints: from plan to plan, what survives a save, and what is refused in one line."""

import errno
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes.checkpoint import (
    Dangerous,
    Run,
    goes_on_as_if_nothing_had_been,
    rewritten,
    same,
)
from support.processes.pool import Pools
from support.programs.local_programs import stack_model

import meshfold
from meshfold.checkpoint_files.folder import CHECKSUMS
from meshfold.errors import MeshfoldError, OptionError

POOLED = "support.processes.checkpoint"


@pytest.fixture(scope="module")
def run() -> Run:
    """What saves, in any state."""
    return Run.started()


@pytest.fixture(scope="module")
def other() -> Run:
    """What loads, in any state."""
    return Run.started(seed=1)


def test_training_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "last"
    for _ in range(2):  # the second one replaces the first
        assert goes_on_as_if_nothing_had_been(str(folder), {}, {}) == 0.0
    assert [f.name for f in folder.parent.iterdir()] == ["last"]
    assert len(list(folder.iterdir())) == 3


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        ({"dp": 2, "zero": 3}, {"tp": 2, "sp": 0}, "AdamW"),
        ({"dp": 2}, {"dp": 2, "microbatches": 2}, "Adafactor"),
        pytest.param(
            {"tp": 2, "sp": 0}, {"pp": 2, "microbatches": 2}, "AdamW", marks=pytest.mark.slow
        ),
        pytest.param(
            {"pp": 2, "microbatches": 2}, {"dp": 2, "zero": 3}, "AdamW", marks=pytest.mark.slow
        ),
    ],
)
def test_from_plan_to_plan(
    pools: Pools, tmp_path: Path, first: dict[str, Any], second: dict[str, Any], kind: str
) -> None:
    name = f"{POOLED}:goes_on_as_if_nothing_had_been"
    for difference in pools.run(2, name, str(tmp_path / "last"), first, second, kind):
        assert difference < 1e-12


@pytest.mark.multiprocess
def test_what_goes_wrong_on_one_rank_is_said_on_all(
    pools: Pools, tmp_path: Path, other: Run
) -> None:
    (saved, lines), (_, others) = pools.run(2, f"{POOLED}:refusals_of_ranks", str(tmp_path / "x"))
    assert lines == others
    full, differs, odd, damaged = lines
    assert full.startswith("rank 1: ") and full.count("\n") == 0
    assert "cannot be written (No space left on device); what was saved before is still" in full
    assert "`extra` or the options of the optimizer's groups differ between ranks; save" in differs
    assert "extra is of type set; a checkpoint takes" in odd
    assert "rank 1: " in damaged and "00001-of-00002.safetensors: damaged" in damaged
    # What two ranks saved loads without processes.
    assert other.load(tmp_path / "x") == {"step": 1}
    for name, x in other.model.state_dict().items():
        assert torch.equal(x, saved[name])


def test_extra_state_comes_back_as_it_was(tmp_path: Path, run: Run) -> None:
    schedule = torch.optim.lr_scheduler.MultiStepLR(run.optimizer, [3, 5])
    extra = {
        "step": 7,
        "scheduler": schedule.state_dict(),
        "loader": {"epoch": 1, "seen": (2, float("inf"), None, True)},
        "rng": [torch.get_rng_state(), random.getstate()],
    }
    run.save(tmp_path / "x", extra)
    found = run.load(tmp_path / "x")
    assert torch.equal(found["rng"][0], extra["rng"][0])  # type: ignore[index]
    assert found["rng"][1] == random.getstate()
    assert {k: found[k] for k in ("step", "scheduler", "loader")} == {
        k: extra[k] for k in ("step", "scheduler", "loader")
    }
    schedule.load_state_dict(found["scheduler"])


def test_what_is_no_checkpoint_of_ours_is_not_saved_over(tmp_path: Path, run: Run) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("words")
    (tmp_path / "partial.partial").mkdir()
    (tmp_path / "partial.partial" / "thesis.tex").write_text("words")
    (tmp_path / "file").write_text("words")
    run.save(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / CHECKSUMS).symlink_to(precious / "thesis.tex")
    before = {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*") if f.name != "dangling"}
    for name, words in (
        (
            "precious",
            "precious: holds thesis.tex and no checkpoint of this version; save elsewhere",
        ),
        ("partial", "partial.partial: holds thesis.tex and no checkpoint"),
        ("file", "file: no folder; save elsewhere, or move it away"),
        ("link", "link: a link; name the folder that it leads to"),
        ("dangling", "dangling: a link; name the folder"),
        ("odd", f"odd/{CHECKSUMS}: no regular file; save elsewhere"),
        ("file/below", "Not a directory"),
    ):
        with pytest.raises(MeshfoldError, match=words):
            run.save(tmp_path / name)
    after = {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*") if f.name != "dangling"}
    assert after == before


def test_foreign_files_stay(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "last"
    folder.mkdir()
    run.save(folder)
    (folder / "notes.txt").write_text("mine")
    (folder / "meshfold-notes").write_text("mine")
    (folder / "more").mkdir()
    run.save(folder)
    assert {"notes.txt", "meshfold-notes", "more"} < {f.name for f in folder.iterdir()}
    assert len(list(folder.iterdir())) == 6


def test_a_damaged_checkpoint_is_replaced_by_the_next_save(tmp_path: Path, run: Run) -> None:
    run.save(tmp_path / "x")
    (tmp_path / "x" / CHECKSUMS).write_text("")
    run.save(tmp_path / "x")
    run.load(tmp_path / "x")
    assert len(list((tmp_path / "x").iterdir())) == 3


def test_a_save_that_fails_leaves_nothing(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MeshfoldError, match=r"safetensors: cannot be written \(No space left"):
        run.save(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_an_older_checkpoint_is_refused_and_nothing_in_it_runs(tmp_path: Path, run: Run) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / ".metadata").write_bytes(pickle.dumps(Dangerous(str(tmp_path / "ran"))))
    with pytest.raises(MeshfoldError, match="old: a checkpoint with pickle, of an older version"):
        run.load(tmp_path / "old")
    with pytest.raises(MeshfoldError, match="nowhere: no checkpoint there; save_checkpoint writes"):
        run.load(tmp_path / "nowhere")
    assert not (tmp_path / "ran").exists()


def test_another_model_is_refused_by_name(tmp_path: Path, run: Run) -> None:
    before = run.contents()
    run.save(tmp_path / "x")
    name = next(n for n, _ in run.model.named_parameters())

    def larger(data: Any) -> None:
        data["tensors"][f"model.{name}"]["shape"][0] *= 2
        data["tensors"][f"model.{name}"]["pieces"] *= 2

    def renamed(data: Any) -> None:
        data["tensors"]["model.other"] = data["tensors"].pop(f"model.{name}")

    def newer(data: Any) -> None:
        data["version"] = 2

    for change, words in (
        (larger, rf"{name} is F64 \[16, 8\] here and F64 \[32, 8\] there; load it into a model"),
        (renamed, f"{name} is missing there, other is missing here; load it into a model like"),
        (newer, "version '2', and this meshfold reads 1; load it with the meshfold that wrote it"),
    ):
        rewritten(shutil.copytree(tmp_path / "x", tmp_path / "changed"), change)
        with pytest.raises(MeshfoldError, match=words):
            run.load(tmp_path / "changed")
        shutil.rmtree(tmp_path / "changed")
    assert same(run.contents(), before)


def test_a_model_without_parameters_has_no_checkpoint(tmp_path: Path) -> None:
    model, batch = stack_model(2)
    closed = meshfold.compile(model, "local-cpux1", batch)
    closed.close()
    for work in (meshfold.save_checkpoint, meshfold.load_checkpoint):
        with pytest.raises(MeshfoldError, match="this model holds no parameters"):
            work(tmp_path / "x", closed)


def test_a_model_that_is_not_compiled_is_refused(tmp_path: Path) -> None:
    model: Any = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    for call in (meshfold.save_checkpoint, meshfold.load_checkpoint):
        with pytest.raises(OptionError, match="is a Linear, which is not compiled; pass what mesh"):
            call(tmp_path / "saved", model, optimizer)
    assert not any(tmp_path.iterdir())
