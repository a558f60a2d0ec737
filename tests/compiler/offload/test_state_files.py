"""Optimizer states in files: the same numbers, no files left behind, one line when a disk fails."""

import copy
import os
from pathlib import Path

import pytest
import torch
from support.processes.offload import started
from torch import Tensor, nn

from meshfold.errors import MeshfoldError, OptionError
from meshfold.offload import state_files
from meshfold.offload.state_files import keep_states_on_disk


def trained(
    folder: Path | None, optimizer: str, steps: int = 3
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A linear of 128 x 256 and its bias, of which only the weight is large enough for a file."""
    torch.manual_seed(0)
    model = nn.Linear(128, 256)
    made = {
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True),
        "adamw of one by one": lambda: torch.optim.AdamW(model.parameters(), foreach=False),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    }[optimizer]()
    if folder is not None:
        keep_states_on_disk(made, folder)
    for k in range(steps):
        step(model, made, k)
    return model, made


def step(model: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> None:
    optimizer.zero_grad()
    model(torch.full((2, 128), 0.1 * (k + 1))).square().sum().backward()
    optimizer.step()


def mapped(optimizer: torch.optim.Optimizer) -> set[str]:
    """Names of states in files, as the system has them."""
    text = Path("/proc/self/maps").read_text().splitlines()
    spans = [
        tuple(int(x, 16) for x in line.split()[0].split("-"))
        for line in text
        if "meshfold-state-" in line
    ]
    return {
        name
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, Tensor) and any(low <= value.data_ptr() < high for low, high in spans)
    }


@pytest.mark.parametrize("optimizer", ["adamw", "adamw of one by one", "sgd"])
def test_training_is_bitwise_the_same(tmp_path: Path, optimizer: str) -> None:
    right, found = trained(None, optimizer), trained(tmp_path, optimizer)
    for a, b in zip(right[0].parameters(), found[0].parameters(), strict=True):
        assert torch.equal(a, b)
    assert not mapped(right[1])
    large = {"momentum_buffer"} if optimizer == "sgd" else {"exp_avg", "exp_avg_sq"}
    assert mapped(found[1]) >= large and "step" not in mapped(found[1])
    # Files are without a name as soon as they are open.
    assert not list(tmp_path.iterdir())


def test_what_is_there_and_what_is_loaded_moves(tmp_path: Path) -> None:
    model, optimizer = trained(None, "adamw")
    states = copy.deepcopy(optimizer.state_dict())
    keep_states_on_disk(optimizer, tmp_path)
    assert mapped(optimizer) == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    optimizer.load_state_dict(states)
    step(model, optimizer, 3)
    assert mapped(optimizer) == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    right = trained(None, "adamw", steps=4)[0]
    assert torch.equal(right.weight, model.weight)


@pytest.mark.parametrize("first", ["files", "scheduler"])
def test_schedulers_of_learning_rates_go_on(tmp_path: Path, first: str) -> None:
    model, optimizer = trained(None, "sgd", steps=0)
    if first == "files":
        keep_states_on_disk(optimizer, tmp_path)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    if first == "scheduler":
        keep_states_on_disk(optimizer, tmp_path)
    step(model, optimizer, 0)
    scheduler.step()
    assert mapped(optimizer) == {"momentum_buffer"}
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_states_of_a_plan_with_offload_go_to_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_files, "LEAST_BYTES", 8)
    right, found = started({}), started({"offload": "optimizer"})
    keep_states_on_disk(found.optimizer, tmp_path)
    right.steps(3), found.steps(3)
    own = dict(right.model.named_parameters())
    assert all(torch.equal(p, own[n]) for n, p in found.model.named_parameters())
    assert mapped(found.optimizer) == {"exp_avg", "exp_avg_sq"}


def test_a_folder_that_takes_no_files_is_refused(tmp_path: Path) -> None:
    _, optimizer = trained(None, "sgd")
    with pytest.raises(OptionError, match="keep_states_on_disk: no file can be made in .*nowhere"):
        keep_states_on_disk(optimizer, tmp_path / "nowhere")


def test_a_full_disk_is_one_line_and_kills_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MeshfoldError, match="optimizer states: no room for 131072 bytes in .*free"):
        trained(tmp_path, "adamw")
    assert not list(tmp_path.iterdir())
    # The mode that makes files is closed again.
    assert torch.zeros_like(torch.empty(1 << 16)).sum() == 0
