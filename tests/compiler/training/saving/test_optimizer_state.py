"""An optimizer of another kind is refused by name, and so is state that ranks cannot share."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.processes.checkpoint import Run, contents, same

import meshfold
from meshfold.checkpoint_files.index import SavedGroup, SavedOptimizer
from meshfold.errors import OptionError
from meshfold.training.saving.optimizer_state import encoded_optimizer, merged, restore, state_of


@pytest.fixture(scope="module")
def run() -> Run:
    return Run.started()


def test_another_optimizer_is_refused_by_name(tmp_path: Path, run: Run) -> None:
    model, before = run.model, run.contents()
    run.save(tmp_path / "x")
    meshfold.save_checkpoint(tmp_path / "alone", model)
    name, first = next(iter(model.named_parameters()))
    every = list(model.parameters())
    halves = [{"params": every[:3]}, {"params": every[3:]}]
    for folder, optimizer, words in (
        ("alone", run.optimizer, "alone: saved without an optimizer; load the model alone"),
        ("x", torch.optim.SGD(every), "x: the optimizer was of kind AdamW, this one is SGD; make"),
        ("x", torch.optim.AdamW(halves), "saved with 1 groups of parameters, this one has 2; make"),
        ("x", torch.optim.AdamW(every[1:]), f"{name} was in group 0 of the optimizer, and is in n"),
        ("x", torch.optim.AdamW([first.detach().clone()]), "group 0 of the optimizer holds"),
    ):
        with pytest.raises(OptionError, match=words):
            meshfold.load_checkpoint(tmp_path / folder, model, optimizer)
    meshfold.save_checkpoint(tmp_path / "halves", model, torch.optim.AdamW(halves))
    swapped = torch.optim.AdamW(halves[::-1])
    with pytest.raises(OptionError, match=f"{name} was in group 0 of the optimizer, and is in gro"):
        meshfold.load_checkpoint(tmp_path / "halves", model, swapped)
    assert same(contents(model, run.optimizer), before)


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.SGD,
        lambda p: torch.optim.SGD(p, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), amsgrad=True),
        torch.optim.Adagrad,
        torch.optim.Rprop,
        lambda p: torch.optim.LBFGS(p, max_iter=1),
    ],
)
def test_state_of_any_optimizer_comes_back(tmp_path: Path, run: Run, kind: Any) -> None:
    """On one process, whatever it holds."""
    optimizer, fresh = kind(run.model.parameters()), kind(run.model.parameters())
    for parameter in run.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(lambda: torch.tensor(1.0))
    meshfold.save_checkpoint(tmp_path / "x", run.model, optimizer)
    meshfold.load_checkpoint(tmp_path / "x", run.model, fresh)
    one, other = optimizer.state_dict(), fresh.state_dict()
    assert repr(one["param_groups"]) == repr(other["param_groups"])
    assert repr(one["state"]) == repr(other["state"])
    for k, values in one["state"].items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, other["state"][k][key])


def test_old_state_does_not_stay(tmp_path: Path, run: Run) -> None:
    fresh = torch.optim.AdamW(run.model.parameters())
    meshfold.save_checkpoint(tmp_path / "x", run.model, fresh)
    used = Run.started().optimizer
    used.param_groups[0]["params"] = list(run.model.parameters())
    for parameter in run.model.parameters():
        used.state[parameter] = {"step": torch.tensor(3.0)}
    meshfold.load_checkpoint(tmp_path / "x", run.model, used)
    assert not any(p in used.state for p in run.model.parameters())


def test_state_that_ranks_cannot_share_is_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    model: Any = SimpleNamespace(
        plan=SimpleNamespace(world_size=2),
        named_parameters=lambda: [("w", weight)],
        global_shape=lambda _: (4, 3),
        saved_form=lambda _, value: torch.cat([value, value]),
    )
    optimizer = torch.optim.SGD([weight])
    optimizer.state[weight] = {"momentum": torch.ones(2, 3), "step": torch.tensor(1.0), "n": 3}
    own: dict[str, torch.Tensor] = {}
    saved = encoded_optimizer(model, optimizer, state_of(model, optimizer), {}, own)
    assert saved.state["w"] == {
        "momentum": {"tensor": "optimizer.w.momentum"},
        "step": {"tensor": "optimizer.w.step"},
        "n": 3,
    }
    assert own["optimizer.w.momentum"].shape == (4, 3)
    optimizer.state[weight]["rows"] = torch.ones(2)
    whole: Any = SimpleNamespace(**{**vars(model), "global_shape": lambda _: (2, 3)})
    whole.saved_form = lambda _, value: value
    own = {}
    encoded_optimizer(whole, optimizer, state_of(whole, optimizer), {}, own)
    assert torch.equal(own["optimizer.w.rows"], torch.ones(2))
    with pytest.raises(OptionError, match=r"optimizer.w.rows has shape \[2\], neither its param"):
        encoded_optimizer(model, optimizer, state_of(model, optimizer), {}, {})


def test_counts_follow_kernels_that_read_them() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, device="meta"))
    model: Any = SimpleNamespace(named_parameters=lambda: [("w", weight)])
    for capturable in (False, True):
        optimizer = torch.optim.AdamW([weight])
        restore(model, optimizer, {"w": {"step": torch.tensor(1.0)}}, [{"capturable": capturable}])
        assert optimizer.state[weight]["step"].is_meta == capturable
        restore(model, optimizer, {"w": {"rows": torch.ones(2)}}, [{}])
        assert optimizer.state[weight]["rows"].is_meta


def test_stages_are_put_together() -> None:
    parts = [
        SavedOptimizer("SGD", (SavedGroup((name,), {"dict": []}),), {name: {"step": 1}})
        for name in ("b", "a")
    ]
    whole = merged(parts)
    assert whole.groups[0].parameters == ("a", "b")
    assert whole.state == {"a": {"step": 1}, "b": {"step": 1}}
