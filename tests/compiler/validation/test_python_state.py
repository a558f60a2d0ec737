"""Steps of a model in one process that keeps tensors in Python do not see each other's."""

import torch
from torch import Tensor, nn

from meshfold.validation.python_state import python_state_kept


class Caching(nn.Module):
    """A scale that eval mode keeps with its graph, and a buffer that is replaced."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.kept: dict[str, Tensor] = {}
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if "scale" not in self.kept:
            self.kept["scale"] = self.scale.exp()
        self.seen = self.seen + 1
        return (x * self.kept["scale"]).sum()


def test_a_second_step_has_a_graph_of_its_own_and_buffers_go_on() -> None:
    model, losses = nn.Sequential(Caching()), []
    for _ in range(3):
        with python_state_kept(model):
            loss = model(torch.ones(3))
            loss.backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            model[0].scale -= 0.5
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 3
    assert model[0].kept == {} and model[0].seen == 3


def test_what_nothing_changes_stays_the_same_object() -> None:
    model = nn.Linear(2, 2)
    weight = model.weight
    with python_state_kept(model):
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight is weight and weight.grad is not None


class Hooking(nn.Module):
    """Registers what it records in its first forward, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.is_hooked = False
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_hooked:
            self.layer.register_forward_hook(lambda *call: self.seen.append(call[-1]))
            self.is_hooked = True
        self.seen.clear()
        self.layer(x)
        (recorded,) = self.seen
        return recorded.sum()


def test_hooks_of_a_first_forward_are_not_registered_twice() -> None:
    model = Hooking()
    for _ in range(3):
        with python_state_kept(model):
            model(torch.ones(1, 2)).backward()
        assert not model.is_hooked and not model.layer._forward_hooks
