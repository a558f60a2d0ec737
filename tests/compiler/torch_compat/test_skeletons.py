"""Copies of modules with other tensors."""

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
