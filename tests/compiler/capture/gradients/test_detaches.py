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


class Placed(nn.Module):
    """Position embeddings that have no gradient, with something of the model written into them, as
    Kosmos-2.5 adds its segments."""

    def __init__(self, write: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.segments = nn.Embedding(8, 4)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("places", torch.randn(8, 4))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.write(self, x)).pow(2).mean()


def to_a_constant(model: Any, x: Tensor) -> Tensor:
    places = model.places.index_select(0, x.view(-1)).view(*x.shape, 4).detach()
    places += model.segments(x)
    return places  # type: ignore[no-any-return]


def to_a_view(model: Any, x: Tensor) -> Tensor:
    places = model.layer(model.places[x]).detach()
    places.view(-1, 4)[: x.shape[1]].add_(model.segments(x[:1]).view(-1, 4))
    return places  # type: ignore[no-any-return]


def in_place(model: Any, x: Tensor) -> Tensor:
    places = model.layer(model.places[x]) * 2
    places.detach_()
    places *= model.segments(x)
    return places  # type: ignore[no-any-return]


def to_a_block(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        places = model.layer(model.places[x]) * 2
    places.add_(model.segments(x))
    return places  # type: ignore[no-any-return]


def given_back(model: Any, x: Tensor) -> Tensor:
    """Ops with nothing to do, beside views, which have no gradient."""
    places = model.layer(model.places[x]) * model.segments(x)
    with torch.no_grad():
        same = places.type_as(places), places.flatten(2), torch.atleast_2d(places)
        more, _ = torch.broadcast_tensors(places, model.places[x])
        views = places.view(places.shape), places.expand(places.shape), places.reshape(-1, 4)
    return sum(same) * more + views[0] + views[1] * views[2].view(places.shape)  # type: ignore[no-any-return]


def cast_to_its_dtype(model: Any, x: Tensor) -> Tensor:
    """As indexers of sparse attention cast hidden states that are read behind them, too."""
    places = model.layer(model.places[x]) * model.segments(x)
    with torch.no_grad():
        chosen = places.to(places.dtype).contiguous().sum(-1, keepdim=True) > 0
        kept = nn.functional.dropout(places, 0.5, training=False) * 2
    return places * chosen + kept  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "write", [to_a_constant, to_a_view, in_place, to_a_block, cast_to_its_dtype, given_back]
)
def test_what_is_written_into_a_detached_value_has_its_gradient(write: Any) -> None:
    model = Placed(write).double()
    x = torch.randint(0, 8, (4, 3))
    with float64_everywhere():
        captured = capture(model, {"x": x})
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    made = run_graph(captured.graph, parameters, buffers, captured.constants, {"x": x})
    (loss,), expected = made.values(), model(x)
    leaves = list(parameters.values())
    for a, b in zip(
        *(torch.autograd.grad(y, leaves, materialize_grads=True) for y in (loss, expected)),
        strict=True,
    ):
        assert torch.allclose(a, b, rtol=0, atol=1e-14)


def read_afterwards(model: Any, x: Tensor) -> Tensor:
    kept = model.places[x] * 1
    kept.detach().add_(model.segments(x))
    return kept  # type: ignore[no-any-return]


def read_as_a_whole(model: Any, x: Tensor) -> Tensor:
    kept = model.places[x] * 1
    part, _ = kept.chunk(2, -1)
    part.detach().add_(model.segments(x)[..., :2])
    return kept  # type: ignore[no-any-return]


def into_a_buffer(model: Any, x: Tensor) -> Tensor:
    places = model.places[:3].detach()
    places += model.segments(x[0])
    return places  # type: ignore[no-any-return]


@pytest.mark.parametrize("write", [read_afterwards, read_as_a_whole, into_a_buffer])
def test_writes_through_detach_that_others_see_are_refused(write: Any) -> None:
    with pytest.raises(CaptureError, match=r"through detach\(\), a tensor whose gradient is used"):
        capture(Placed(write), {"x": torch.randint(0, 8, (4, 3))})
