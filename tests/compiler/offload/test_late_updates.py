"""Updates that a step does not see are one, always, and the numbers are those of that."""

import copy
from pathlib import Path

import pytest
import torch
from support.processes.offload import started
from torch import Tensor, nn

import meshfold
from meshfold.errors import OptionError
from meshfold.offload.late_updates import LateUpdates


def expected(steps: int) -> list[Tensor]:
    """The parameters after steps of which each reads what was there before the last update."""
    run = started({})
    read = list(run.model.parameters())
    updated = [nn.Parameter(p.detach().clone()) for p in read]
    optimizer = torch.optim.AdamW(updated, lr=0.05)
    for k in range(steps):
        optimizer.param_groups[0]["lr"] = 0.05 / (k + 1)
        run.model.train_step(run.batch)
        for a, b in zip(read, updated, strict=True):
            b.grad, a.grad = a.grad, None
            a.data.copy_(b)
        optimizer.step()
    return updated


@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
def test_a_step_reads_parameters_that_are_one_update_old(offload: str, tmp_path: Path) -> None:
    run = started({"offload": offload})
    late = LateUpdates(run.model, run.optimizer)
    for k in range(4):
        run.optimizer.param_groups[0]["lr"] = 0.05 / (k + 1)
        run.model.train_step(run.batch)
        late.step()
        late.zero_grad()
        run.optimizer.param_groups[0]["lr"] = 7.0  # as a scheduler beside the update
    late.finish()
    for a, b in zip(run.model.parameters(), expected(4), strict=True):
        assert torch.equal(a, b)
    # A state dict waits for the update, and the states are the optimizer's.
    meshfold.save_checkpoint(str(tmp_path / "last"), run.model, run.optimizer)
    assert {int(x["step"]) for x in run.optimizer.state.values()} == {4}


def test_a_state_dict_waits_for_the_update() -> None:
    run = started({"offload": "optimizer"})
    late = LateUpdates(run.model, run.optimizer)
    for _ in range(2):
        run.model.train_step(run.batch)
        late.step()
    state, right = run.model.full_state_dict(), expected_names(run.model)
    late.finish()
    assert all(torch.equal(state[name], x) for name, x in right.items())


def test_a_copy_is_made_before_updates_are_late() -> None:
    run = started({"offload": "optimizer"})
    twin = copy.deepcopy(run.model)
    LateUpdates(run.model, run.optimizer)
    assert twin.train_step(run.batch) == run.model.train_step(run.batch)
    for a, b in zip(twin.parameters(), run.model.parameters(), strict=True):
        assert a is not b and torch.equal(a.grad, b.grad)
    with pytest.raises(OptionError, match="copy the model before LateUpdates is made of it"):
        copy.deepcopy(run.model)


def expected_names(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def test_what_an_update_raises_comes_with_the_next_step() -> None:
    run = started({"offload": "optimizer"})
    late = LateUpdates(run.model, run.optimizer)
    run.model.train_step(run.batch)
    run.optimizer.param_groups[0]["betas"] = None
    late.step()
    with pytest.raises(TypeError):
        late.step()


def test_only_what_is_on_the_host_can_be_late(tmp_path: Path) -> None:
    here = started({})
    with pytest.raises(OptionError, match="no parameters on the host"):
        LateUpdates(here.model, here.optimizer)
    away = started({"offload": "optimizer"})
    meshfold.keep_states_on_disk(away.optimizer, tmp_path)
    with pytest.raises(OptionError, match="AdamW.step was replaced"):
        LateUpdates(away.model, away.optimizer)
