"""Gradients inside of a forward: the graph has those that torch has, or the model is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.capture.pipeline import capture
from meshfold.errors import CaptureError
from meshfold.ops.reference_interpreter import run_graph
from meshfold.validation.float64_mode import float64_everywhere


class Stepped(nn.Module):
    """A loss after a step of gradient descent on another one, as MAML has it."""

    def __init__(self, create_graph: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.outer = nn.Linear(4, 2)
        self.create_graph = create_graph

    def forward(self, x: Tensor) -> Any:
        loss = self.outer(self.inner(x).tanh()).pow(2).mean()
        (step,) = torch.autograd.grad(
            loss, [self.outer.weight], create_graph=self.create_graph, retain_graph=True
        )
        return (self.inner(x).tanh() @ (self.outer.weight - 0.5 * step).t()).sum() + loss


class Marked(Stepped):
    def forward(self, x: Tensor) -> Any:
        noise = torch.zeros_like(x).requires_grad_()
        return self.outer(self.inner(x.requires_grad_(True) + noise)).pow(2).mean()


@pytest.mark.parametrize("model", [Stepped(False), Stepped(True), Marked(False)])
def test_gradients_are_those_of_the_model(model: nn.Module) -> None:
    model.double()
    parameters, x = dict(model.named_parameters()), torch.randn(5, 3, dtype=torch.float64)
    with float64_everywhere():
        captured = capture(model, {"x": x})
    made = run_graph(captured.graph, parameters, {}, captured.constants, {"x": x})
    (loss,), expected = made.values(), model(x.clone())
    pairs = (torch.autograd.grad(y, list(parameters.values())) for y in (loss, expected))
    for a, b in ((loss, expected), *zip(*pairs, strict=True)):
        assert torch.allclose(a, b, rtol=0, atol=1e-14)


class Penalized(nn.Module):
    def __init__(self, penalty: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
        self.lstm = nn.LSTM(3, 3)
        self.kept = [torch.ones(3)]
        self.penalty = penalty

    def forward(self, x: Tensor) -> Any:
        return self.penalty(self, x)


def through_a_cell(model: Any, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(model.lstm(model.layer[0](x)[None])[0].sum(), x)
    return model.layer(found).norm()


def of_every_sample(model: Any, x: Tensor) -> Any:
    return torch.func.vmap(torch.func.grad(lambda x: model.layer(x).sum()))(x).norm()


def of_what_is_kept(model: Any, x: Tensor) -> Any:
    return model.layer(x * model.kept[0].requires_grad_()).mean()


@pytest.mark.parametrize(
    ("penalty", "text"),
    [
        (
            through_a_cell,
            r"goes back through results of ops.*torch\.func\.jvp.*test_detaches.py:",
        ),
        (
            of_every_sample,
            r"^torch.func cannot be captured: a gradient is taken inside of torch.func.vmap; take",
        ),
        (of_what_is_kept, r"requires_grad_ on a tensor that the model keeps .* nn\.Parameter"),
    ],
)
def test_other_gradients_are_refused(penalty: Any, text: str) -> None:
    with pytest.raises(CaptureError, match=text):
        capture(Penalized(penalty), {"x": torch.ones(2, 3)})
