"""Gradients inside of forward, through networks drawn at random, are those of the model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.capture.gradients.parts import PARTS
from meshfold.capture.gradients.route import Route, Step
from meshfold.capture.pipeline import Captured, capture
from meshfold.ops.reference_interpreter import run_graph
from meshfold.validation.float64_mode import float64_everywhere

WIDTH, EXACT = 6, 1e-9
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "group norm": lambda: nn.GroupNorm(2, WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "softmax": lambda: nn.Softmax(-1),
    "log softmax": lambda: nn.LogSoftmax(-1),
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "fast gelu": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "leaky relu": lambda: nn.LeakyReLU(0.2),
    "softplus": nn.Softplus,
    "mish": nn.Mish,
    "hardtanh": nn.Hardtanh,
    "prelu": nn.PReLU,
    "log sigmoid": nn.LogSigmoid,
}


class Network(nn.Module):
    def __init__(self, names: list[str], takes: Callable[["Network", Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(LAYERS[name]() for name in names), nn.Linear(WIDTH, 2))
        self.takes = takes

    def forward(self, x: Tensor) -> Tensor:
        return self.takes(self, x)


def penalty(model: Network, x: Tensor) -> Tensor:
    mixed = x.clone().requires_grad_()
    scores = model.layers(mixed)
    (found,) = torch.autograd.grad(scores, mixed, torch.ones_like(scores), create_graph=True)
    return (found.norm(dim=1) - 1).square().mean() + scores.mean()


def second_order(model: Network, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(model.layers(x)[:, 0].sum(), x, create_graph=True)
    slope = first[:, 1].sum() + x.square().sum()  # a network of linear layers has no second one
    (second,) = torch.autograd.grad(slope, x, create_graph=True)
    return second.square().mean() + first.mean()


def adversarial(model: Network, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    loss = model.layers(x).square().mean()
    (found,) = torch.autograd.grad(loss, x, retain_graph=True)
    return loss + model.layers(x + 0.1 * found).square().mean()


def functional(model: Network, x: Tensor) -> Tensor:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model.layers, parameters, (x,)).square().mean()

    parameters = dict(model.layers.named_parameters())
    found, before = torch.func.grad_and_value(loss)(parameters)
    return loss({name: p - 0.1 * found[name] for name, p in parameters.items()}) + before


def products(model: Network, x: Tensor) -> Tensor:
    out, back = torch.func.vjp(model.layers, x)
    (found,) = back(torch.ones_like(out))
    return found.square().mean() + torch.func.jacrev(lambda x: model.layers(x).sum(0))(x).mean()


def in_place(model: Network, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    hidden = F.linear(x, model.layers[-1].weight.t() @ model.layers[-1].weight).sin_()
    hidden.mul_(hidden.exp()).pow_(2)
    hidden[:, :2].mul_(2.0)
    F.mish(F.silu(hidden, inplace=True), inplace=True)
    (found,) = torch.autograd.grad(model.layers(hidden).sum(), x, create_graph=True)
    return found.square().mean()


@contextmanager
def _plain_norms() -> Iterator[None]:
    """Torch's own third derivatives through layer and batch norm are wrong: finite differences and
    the formulas agree on others."""

    def layer_norm(
        x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 0
    ) -> Any:
        dims = list(range(-len(shape), 0))
        centred = x - x.mean(dims, keepdim=True)
        found = centred / (centred.square().mean(dims, keepdim=True) + eps).sqrt()
        return found if weight is None else found * weight + bias

    def batch_norm(x: Tensor, mean: Any, var: Any, *args: Any, **kwargs: Any) -> Any:
        weight, bias, training, momentum, eps = args
        how = (training, momentum, eps, False)
        return PARTS["aten.batch_norm.default"](x, weight, bias, mean, var, *how)

    with mock.patch.multiple(F, layer_norm=layer_norm, batch_norm=batch_norm):
        yield


def _assert_alike(model: nn.Module, x: Tensor) -> Captured:
    """Loss and gradients of the captured program and of the model, in float64."""
    model.double()
    parameters = dict(model.named_parameters())
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    with float64_everywhere():
        captured = capture(model, {"x": x})
    loss = run_graph(captured.graph, parameters, buffers, captured.constants, {"x": x})
    (mine,) = loss.values()
    with _plain_norms():
        theirs = model(x)
    both = [
        torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
        for value in (mine, theirs)
    ]
    pairs = [
        [torch.zeros((), dtype=x.dtype) if v is None else v for v in pair]
        for pair in ((mine, theirs), *zip(*both, strict=True))
    ]
    # What cancels out is as exact as what it is made of.
    size = max(1.0, *(float(right.detach().abs().max()) for _, right in pairs))
    for left, right in pairs:
        assert float((left - right).detach().abs().max()) <= EXACT * size
    for name, right in model.named_buffers():
        assert torch.allclose(buffers[name].double(), right.double(), rtol=1e-12)
    return captured


@settings(max_examples=12, deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4),
    takes=st.sampled_from((penalty, second_order, adversarial, functional, products, in_place)),
    seed=st.integers(0, 99),
)
def test_gradients_are_those_of_the_model(names: list[str], takes: Any, seed: int) -> None:
    torch.manual_seed(seed)
    if takes in (functional, products):  # torch refuses its statistics there
        names = [name for name in names if name != "batch norm"]
    _assert_alike(Network(names, takes), torch.randn(6, WIDTH, dtype=torch.float64))


class Image(nn.Module):
    """A penalty on a small convolutional network; its head is not gone through."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(2, 4, 3, stride=2, padding=1, groups=2),
            nn.InstanceNorm1d(4, affine=True),
            nn.Tanh(),
            nn.Conv1d(4, 4, 2, padding="same", dilation=2),
        )
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        found = self.body(x)
        (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        after = self.head(self.norm(found.mean(-1)))
        return slope.square().mean() + F.cross_entropy(after, torch.arange(len(x)) % 3)


def test_ops_beside_the_way_stay_as_they_are_called() -> None:
    captured = _assert_alike(Image(), torch.randn(4, 2, 8, dtype=torch.float64))
    ops = [op.target for region in captured.graph.regions for op in region.graph.ops]
    assert {"aten.conv1d.default", "aten.layer_norm.default", "aten.linear.default"} <= set(ops)
    assert "aten.instance_norm.default" not in ops
    assert "aten.cross_entropy_loss.default" in ops
    assert not [op for op in ops if "backward" in op]


def test_a_route_has_three_steps() -> None:
    route = Route()
    assert (route.step, route.go_on()) == (Step.AS_CALLED, True)
    assert route.is_observing
    with route.traced():
        pass
    assert route.go_on()
    assert (route.step, route.calls, route.go_on()) == (Step.IN_PARTS, frozenset(), False)


def test_a_route_leaves_what_is_not_traced_alone() -> None:
    route = Route()
    route.go_on()
    with route.traced():
        x = torch.ones(2, requires_grad=True)
        with route.going_back(x.sum(), x):
            torch.autograd.grad(x.sum(), x)


@pytest.mark.parametrize("asks", [True, False])
def test_inputs_that_gradients_are_taken_of_are_marked(asks: bool) -> None:
    model = Network(["tanh"], penalty if asks else lambda model, x: model.layers(x).mean())
    marked = Network(["tanh"], lambda model, x: torch.autograd.grad(model.layers(x).sum(), x)[0])
    del marked.layers[1]
    x = torch.randn(3, WIDTH)
    assert not any(i.is_differentiated for i in capture(model, {"x": x}).graph.inputs)
    other = Network(["tanh"], lambda model, x: _input_penalty(model, x, asks))
    (info,) = capture(other, {"x": torch.randn(3, WIDTH, requires_grad=not asks)}).graph.inputs
    assert info.is_differentiated


def _input_penalty(model: Network, x: Tensor, marks: bool) -> Tensor:
    x = x.requires_grad_() if marks else x
    (found,) = torch.autograd.grad(model.layers(x).sum(), x, create_graph=True)
    return found.square().sum()
