"""Buffers that forward replaces."""

import pytest
import torch
from support.programs.linears import Linears, Middle, assert_refused, with_middle
from torch import Tensor, nn

import meshfold
from meshfold.capture.pipeline import capture
from meshfold.ir.op_graph import FoldedGraph


class Averaged(nn.Module):
    """Keeps a running mean in a buffer, and another in turn with it."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("other", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        mean, other = 0.9 * self.mean + 0.1 * x.mean(0), self.mean.clone()
        if self.replaces:
            self.mean, self.other = mean, self.mean
        else:
            self.mean.copy_(mean)
            self.other.copy_(other)
        return (self.linear(x) - mean + self.other).square().mean()


class ManyAveraged(nn.Module):
    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Averaged(replaces) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return sum(layer(x) for layer in self.layers)


def num_writes(graph: FoldedGraph) -> int:
    return sum(len(graph.regions[i.region].graph.mutations) for i in graph.instances)


@pytest.mark.parametrize("model", [Averaged, ManyAveraged])
def test_a_buffer_that_forward_replaces_is_written(model: type[nn.Module]) -> None:
    replaced, written = (capture(model(r), {"x": torch.randn(8, 4)}).graph for r in (True, False))
    assert num_writes(replaced) == num_writes(written) > 0


class Swapped(nn.Module):
    """Two buffers that take each other's place, as views."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4)
        self.register_buffer("one", torch.full((4,), 1.0))
        self.register_buffer("two", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        self.one, self.two = self.two.view(-1), self.one.view(-1)
        return (self.last(x) + self.one).square().mean()


def test_buffers_that_change_places_as_views_keep_their_numbers() -> None:
    compiled = meshfold.compile(Swapped(), "local-cpux1", {"x": torch.randn(8, 4)})
    for step in range(3):
        compiled.train_step({"x": torch.randn(8, 4)})
        found = [compiled.one[0].item(), compiled.two[0].item()]
        assert found == ([2.0, 1.0] if step % 2 == 0 else [1.0, 2.0])


def longer(model: Linears, h: Tensor) -> Tensor:
    model.history = torch.cat([model.history, h[:1].detach()])
    return h + model.history.mean(0)


def cast(model: Linears, h: Tensor) -> Tensor:
    h = h * model.factor
    model.factor = (0.5 * model.factor).to(torch.bfloat16)
    return h


def grown_once(model: Linears, h: Tensor) -> Tensor:
    if len(model.history) < 8:
        model.history = torch.arange(32.0).view(8, 4)
    return h + model.history


REMADE = {
    longer: r"replaces the buffer history, \(1, 4\) float32 by \(2, 4\) float32, which no buffer",
    cast: r"replaces the buffer factor, \(4,\) float32 by \(4,\) bfloat16, .*; keep its shape",
    grown_once: "",
}


@pytest.mark.parametrize("middle", REMADE, ids=lambda f: f.__name__)
def test_a_buffer_that_becomes_another_is_refused(middle: Middle) -> None:
    assert_refused(with_middle(Linears, middle), REMADE[middle])
