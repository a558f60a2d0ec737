"""Shards under the names of the original."""

import pytest
import torch
from torch import nn

from meshfold.errors import MeshfoldError
from meshfold.training.foreign_wrappers import OwnParallelism
from meshfold.training.module_tree import register_shards


def test_tied_names_are_one_parameter_in_the_order_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    names += [n for n, _ in model.named_buffers()]
    canonical = {n: "0.weight" if n == "1.weight" else n for n in names}
    shards = {n: nn.Parameter(torch.ones(1)) for n, _ in model.named_parameters()}
    buffers = {n: torch.zeros(1) for n, _ in model.named_buffers()}
    root = OwnParallelism()
    register_shards(root, model, canonical, shards, buffers, dict.fromkeys(buffers, True))
    assert root.get_parameter("1.weight") is shards["0.weight"]
    assert [n for n, _ in root.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [*root.state_dict()] == [*model.state_dict()]


def test_what_another_stage_holds_has_a_module_and_says_where_it_is() -> None:
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "last": nn.Linear(2, 2)})
    canonical = {n: n for n, _ in model.named_parameters()}
    here = {n: nn.Parameter(torch.ones(1)) for n in canonical if n.startswith("first")}
    root = OwnParallelism()
    register_shards(root, model, canonical, here, {}, {})
    root.last.requires_grad_(False)  # as on the ranks that hold it
    assert [*root.last.parameters()] == []
    with pytest.raises(AttributeError, match=r"weight is a tensor .* this rank does not hold"):
        _ = root.last.weight
    with pytest.raises(AttributeError, match="'PartOfModel' object has no attribute 'wait'"):
        _ = root.last.wait


def test_a_submodule_with_a_name_of_ours_is_refused() -> None:
    model = nn.ModuleDict({"inner": nn.Linear(2, 2)})
    root = OwnParallelism()
    root.inner = "taken"
    with pytest.raises(MeshfoldError, match="calls a submodule 'inner', which is an attribute"):
        shard = {"inner.weight": nn.Parameter(torch.ones(1))}
        register_shards(root, model, {n: n for n, _ in model.named_parameters()}, shard, {}, {})
