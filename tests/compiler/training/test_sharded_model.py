"""The state of a compiled model, as that of the original."""

import copy

import pytest
import torch
from support.programs.local_programs import compiled_stack
from torch import Tensor, nn

import meshfold
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import OptionError


class Twisted(nn.Module):
    """Tied across modules, so that names and order are not those of creation."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.first = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.ones(4))
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.middle(self.first(x * self.scale)) * self.mask
        return (self.last(y) + self.shift).square().mean()


def test_names_order_ties_and_state_are_those_of_the_original() -> None:
    model = Twisted()
    x = torch.randn(2, 4)
    compiled = meshfold.compile(model, resolve_cluster("local-cpu", 1), {"x": x})
    for names in ("named_parameters", "named_buffers"):
        for duplicates in (True, False):
            listed = [
                [n for n, _ in getattr(m, names)(remove_duplicate=duplicates)]
                for m in (model, compiled)
            ]
            assert listed[0] == listed[1]
    assert compiled.last.weight is compiled.first.weight
    state = compiled.state_dict()
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(state[n], x) for n, x in model.state_dict().items())
    compiled(x=x).backward()
    assert compiled.unused.grad is None
    model(x).backward()
    assert torch.allclose(compiled.first.weight.grad, model.first.weight.grad, atol=1e-6)


def test_weights_are_copies_and_load_back() -> None:
    model, batch, compiled = compiled_stack()
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in compiled.parameters():
            parameter.zero_()
    with pytest.warns(UserWarning, match=r"are those from before meshfold\.compile"):
        state = model.state_dict()
    assert all(torch.equal(x, before[n]) for n, x in state.items())
    compiled.load_state_dict(before)
    with pytest.warns(UserWarning, match=r"are those from before meshfold\.compile"):
        assert torch.equal(compiled(**batch), model(**batch))
    assert all(torch.equal(x, before[n]) for n, x in compiled.full_state_dict().items())


def test_loading_complains_as_modules_do() -> None:
    _, _, compiled = compiled_stack()
    state = dict(compiled.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        compiled.load_state_dict({k: v for k, v in state.items() if "up" not in k})
    with pytest.raises(OptionError, match="assign=True would replace local shards"):
        compiled.load_state_dict(state, assign=True)
    with pytest.raises(OptionError, match=r"layers.0.up.bias has shape \[16\], the state given"):
        compiled.load_state_dict(state | {"layers.0.up.bias": torch.zeros(3)})


def test_a_module_inside_another_keeps_its_prefix() -> None:
    model, _, compiled = compiled_stack()
    outer = nn.ModuleDict({"inner": compiled})
    assert list(outer.state_dict()) == [f"inner.{name}" for name in model.state_dict()]
