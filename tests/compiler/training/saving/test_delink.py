"""Shared layers become independent ones: the loss is the same bit for bit, states are copied, and
what does not fit is refused before anything is written."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.factories import Deep, deep
from support.processes.checkpoint import delinks, trained_deep
from support.processes.pool import Pools
from torch import nn

import meshfold
from meshfold.errors import MeshfoldError
from meshfold.training.saving.delink import Delinked, delink


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one block that is called at every depth."""
    folder = tmp_path_factory.mktemp("delink") / "shared"
    model, optimizer, step = trained_deep("called", {})
    step()
    meshfold.save_checkpoint(folder, model, optimizer, extra={"step": 1, "x": torch.arange(3)})
    return folder


@pytest.mark.parametrize("sharing", ["called", "placed", "tied"])
def test_the_first_loss_is_the_same_bit_for_bit(tmp_path: Path, sharing: str) -> None:
    shared, released = delinks(str(tmp_path), sharing, {})
    assert shared == released
    assert sorted(f.name for f in tmp_path.iterdir()) == ["released", "shared"]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "pins",
    [
        {"dp": 2, "zero": 3, "microbatches": 1},
        pytest.param({"tp": 2, "microbatches": 1}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "microbatches": 2}, marks=pytest.mark.slow),
    ],
)
def test_so_it_is_on_two_processes(pools: Pools, tmp_path: Path, pins: dict[str, Any]) -> None:
    name = "support.processes.checkpoint:delinks"
    for shared, released in pools.run(2, name, str(tmp_path), "called", pins):
        assert shared == released


def test_parameters_buffers_and_states_are_copied_for_each_use(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shared, batch = deep("called")
    with torch.device("meta"):
        released = deep()[0]
    # AdamW has three states of each of the two biases and weights outside and three inside.
    assert delink(saved, out, shared, released, batch) == Delinked(3, 12, 48, "AdamW")
    before, states_before, _ = trained_deep("called", {})
    meshfold.load_checkpoint(saved, before, states_before)
    after, states, _ = trained_deep("none", {})
    extra = meshfold.load_checkpoint(out, after, states)
    assert extra["step"] == 1 and torch.equal(extra["x"], torch.arange(3))
    assert after.num_forwards == before.num_forwards
    olds, news = dict(before.named_parameters()), dict(after.named_parameters())
    for name, parameter in news.items():
        old = olds[".".join(["block", *name.split(".")[2:]]) if "blocks" in name else name]
        assert torch.equal(parameter, old)
        assert states.state[parameter].keys() == states_before.state[old].keys()
        for key, value in states.state[parameter].items():
            assert torch.equal(value, states_before.state[old][key])
    assert len({p.data_ptr() for p in news.values()}) == len(news) == 4 + 3 * 4
    assert torch.equal(after.state_dict()["blocks.3.scale"], before.state_dict()["block.scale"])


def test_without_the_optimizer(saved: Path, tmp_path: Path) -> None:
    (shared, batch), (released, _) = deep("called"), deep()
    done = delink(saved, tmp_path / "out", shared, released, batch, parameters_only=True)
    assert done == Delinked(3, 12, 0, "")
    model, optimizer, _ = trained_deep("none", {})
    meshfold.load_checkpoint(tmp_path / "out", model)
    with pytest.raises(MeshfoldError, match="saved without an optimizer"):
        meshfold.load_checkpoint(tmp_path / "out", model, optimizer)


def test_a_checkpoint_without_an_optimizer_is_released_only_as_asked(tmp_path: Path) -> None:
    model, _, _ = trained_deep("called", {})
    meshfold.save_checkpoint(tmp_path / "bare", model)
    (shared, batch), (released, _) = deep("called"), deep()
    with pytest.raises(MeshfoldError, match="saved without an optimizer, so the training would"):
        delink(tmp_path / "bare", tmp_path / "out", shared, released, batch)
    assert not (tmp_path / "out").exists()
    done = delink(
        tmp_path / "bare", tmp_path / "out", shared, released, batch, parameters_only=True
    )
    assert done.num_copies == 12


def test_an_optimizer_before_its_first_step_has_no_states_to_copy(tmp_path: Path) -> None:
    model, optimizer, _ = trained_deep("called", {})
    meshfold.save_checkpoint(tmp_path / "new", model, optimizer)
    (shared, batch), (released, _) = deep("called"), deep()
    assert delink(tmp_path / "new", tmp_path / "out", shared, released, batch).num_states == 0
    again, states, step = trained_deep("none", {})
    meshfold.load_checkpoint(tmp_path / "out", again, states)
    step()


class WithUnread(Deep):
    """A model that also has a parameter that nothing reads."""

    def __init__(self, sharing: str) -> None:
        super().__init__(sharing)
        self.own = nn.Parameter(torch.zeros(2))


class Squared(Deep):
    """A model that computes something else."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(x.square(), target)


@pytest.mark.parametrize(
    ("shared", "released", "words"),
    [
        (deep("called")[0], deep("called")[0], "nothing is shared: every parameter of the one"),
        (deep("called")[0], Squared(), "the models run different ops: number 0 is"),
        (deep("called")[0], WithUnread("none"), "own is read by no op, and the model with"),
        (WithUnread("called"), deep()[0], "own of the model with shared layers has no"),
        (deep("placed")[0], deep()[0], "block.down.weight is missing in the model; give the"),
    ],
)
def test_models_that_do_not_belong_together_are_refused(
    saved: Path, tmp_path: Path, shared: nn.Module, released: nn.Module, words: str
) -> None:
    batch = deep()[1]
    with pytest.raises(MeshfoldError, match=words) as caught:
        delink(saved, tmp_path / "out", shared, released, batch)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_what_was_in_the_folder_stays_where_it_fails(saved: Path, tmp_path: Path) -> None:
    (shared, batch), (released, _) = deep("called"), deep()
    delink(saved, tmp_path / "out", shared, released, batch)
    before = {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()}
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in saved.iterdir():
        content = file.read_bytes()
        is_tensors = file.suffix == ".safetensors"
        (broken / file.name).write_bytes(content[:-1] + b"?" if is_tensors else content)
    with pytest.raises(MeshfoldError, match="damaged, its sha256 is not that of"):
        delink(broken, tmp_path / "out", shared, released, batch)
    assert {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()} == before
    with pytest.raises(MeshfoldError, match="damaged"):
        delink(broken, tmp_path / "new", shared, released, batch)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["broken", "out"]
    with pytest.raises(MeshfoldError, match="the checkpoint that is read; write to another"):
        delink(saved, saved, shared, released, batch)
    partial = saved.rename(tmp_path / "x.partial")
    with pytest.raises(MeshfoldError, match="the checkpoint that is read; write to another"):
        delink(partial, tmp_path / "x", shared, released, batch)
    partial.rename(saved)
    with pytest.raises(MeshfoldError, match="no checkpoint there"):
        delink(tmp_path / "none", tmp_path / "new", shared, released, batch)
