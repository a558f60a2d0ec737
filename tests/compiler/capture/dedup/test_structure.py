"""What a first run must leave alone for its layers to be reused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshfold.capture.dedup.structure import Hooks, Structure


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Dropout())


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "a hook": lambda m: m[0].register_forward_hook(lambda *_: None),
    "a buffer": lambda m: m[0].register_buffer("mask", torch.ones(2)),
    "a parameter": lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "a submodule": lambda m: m[0].add_module("inner", nn.Identity()),
    "a mode": lambda m: m[1].eval(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_a_model_are_named(name: str) -> None:
    model = _model()
    structure = Structure(model)
    assert structure.change() == ""
    CHANGES[name](model)
    assert structure.change()


def test_hooks_registered_since_are_named_and_older_ones_are_not() -> None:
    model = _model()
    model[1].register_forward_hook(lambda *_: None)
    hooks = Hooks(model)
    assert hooks.registered(model) == ""
    model[0].register_forward_pre_hook(lambda *_: None)
    assert hooks.registered(model) == "hooks of 0"
