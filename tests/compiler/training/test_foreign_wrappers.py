"""A module of shards is no module for what distributes modules."""

import pytest
import torch
from torch import nn

from meshfold.errors import OptionError
from meshfold.training.foreign_wrappers import OwnParallelism


def test_marks_of_other_wrappers_are_refused_and_all_else_is_set() -> None:
    module = OwnParallelism()
    module.layer = nn.Linear(2, 2)
    assert [n for n, _ in module.named_parameters()] == ["layer.weight", "layer.bias"]
    with pytest.raises(OptionError, match="FSDP around a compiled model"):
        module._is_fsdp_managed_module = True
    with pytest.raises(OptionError, match="DistributedDataParallel around a compiled model"):
        hasattr(module, "_ddp_params_and_buffers_to_ignore")
    assert isinstance(module.layer.weight, torch.nn.Parameter)
