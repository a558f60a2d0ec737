"""A module of shards is no module for what distributes modules."""

import pytest
import torch
from torch import nn

import meshfold
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


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum()


def test_what_would_do_nothing_inside_of_a_compiled_model_is_refused() -> None:
    x = torch.ones(2, 2)
    compiled = meshfold.compile(Net(), "local-cpux1", {"x": x})
    part = compiled.get_submodule("layer")
    for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
        with pytest.raises(OptionError, match=r"a hook of a part .* before meshfold\.compile"):
            getattr(part, f"register_{kind}_hook")(lambda *args: None)
    with pytest.raises(OptionError, match="a part of a compiled model is called"):
        part(x)
    for module in (compiled, part):
        with pytest.raises(OptionError, match="apply it to the model before meshfold.compile"):
            module.apply(lambda m: None)
    with pytest.raises(OptionError, match="in_features of a part .* set it before mesh"):
        part.in_features = 3
    called: list[str] = []
    compiled.register_forward_hook(lambda *args: called.append("forward"))
    compiled.get_parameter("layer.weight").register_hook(lambda g: called.append("parameter"))
    compiled(x).backward()
    assert called == ["forward", "parameter"]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)).square().sum()


def test_a_part_has_the_mode_that_was_captured() -> None:
    x = torch.randn(4, 2)
    compiled = meshfold.compile(Normed(), "local-cpux1", {"x": x})
    assert not compiled.eval().get_submodule("body.1").training
    assert compiled.train().get_submodule("body.1").training
    with pytest.raises(OptionError, match="mode 'eval': neither train nor eval; write True or F"):
        compiled.train("eval")  # type: ignore[arg-type]
    for name in ("body", "body.1"):
        with pytest.raises(OptionError, match="it in train mode .* before meshfold.compile"):
            compiled.get_submodule(name).eval()
    assert not compiled.get_submodule("head").eval().training, "it has but one mode"
    frozen = Normed()
    frozen.body.eval()
    compiled = meshfold.compile(frozen, "local-cpux1", {"x": x}).train()
    compiled.get_submodule("body").eval()
    compiled.train_step({"x": x})
    assert int(compiled.get_buffer("body.1.num_batches_tracked")) == 0
    with pytest.raises(OptionError, match="in eval mode"):
        compiled.get_submodule("body").train()
