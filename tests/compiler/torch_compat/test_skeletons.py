"""Copies of modules with other tensors."""

import threading

import pytest
import torch
from torch import nn

from meshfold.torch_compat.skeletons import meta_copy


def test_a_copy_on_meta_keeps_ties_modes_and_gradients() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    skeleton = meta_copy(model.eval())
    first, norm, last = skeleton
    assert first.weight is last.weight
    assert not skeleton.training
    assert [p.requires_grad for p in skeleton.parameters()] == [True, True, True, False]
    assert all(p.is_meta for p in (*skeleton.parameters(), *skeleton.buffers()))
    assert norm.running_mean.dtype == torch.float32
    assert not any(p.is_meta for p in (*model.parameters(), *model.buffers()))


class Fields(dict):  # type: ignore[type-arg]
    """A configuration as many have it: no attribute is an AttributeError."""

    __getattr__ = dict.__getitem__


def test_what_deepcopy_refuses_is_kept() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model.functional, model[0].lock = nn.functional, threading.Lock()
    model.fields = model[0].fields = Fields(width=3, inner=Fields(sizes=[1, 2]))
    skeleton = meta_copy(model)
    assert skeleton.functional is nn.functional and skeleton[0].lock is model[0].lock
    fields = skeleton.fields
    assert type(fields) is Fields and fields is skeleton[0].fields and fields == model.fields
    assert fields is not model.fields and fields.inner.sizes is not model.fields.inner.sizes


def test_what_may_hold_a_state_is_not_shared() -> None:
    model = nn.Linear(3, 3)
    model.numbers = (k for k in range(3))
    with pytest.raises(TypeError, match="generator"):
        meta_copy(model)
