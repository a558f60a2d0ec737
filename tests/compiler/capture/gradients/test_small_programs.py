"""Small programs of views, writes in place and blocks without gradients: the values and gradients
of torch, or a refusal in plain words. Those by name are each in somebody's model; others are drawn.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from meshfold.capture.pipeline import capture
from meshfold.errors import CaptureError
from meshfold.validation.captured_alone import captured_step
from meshfold.validation.float64_mode import float64_everywhere

SIZE = 4


class Small(nn.Module):
    """body: of two linears of the same input, each a tensor of its own that has a gradient."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        made = self.body(self.one(x) * 1, self.two(x) * 1, x)
        loss: Tensor = made.square().mean()
        return loss


def write(h: Tensor, index: Any, value: Any) -> Tensor:
    h[index] = value
    return h


def then(h: Tensor, _: Any) -> Tensor:
    """h, after what was written through views of it."""
    return h


VIEWS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "add to a view": lambda h, k, x: then(h, h.view(-1).add_(k.view(-1))),
    "fill a transposed view": lambda h, k, x: then(h, h.t().masked_fill_((x > 0).t(), 0.3)) * k,
    "flattened": lambda h, k, x: then(h, h.flatten()[3:7].zero_()) * k,
    "unflattened": lambda h, k, x: then(h, h.unflatten(1, (2, 2))[:, 0].mul_(k[:, :2])),
    "permuted": lambda h, k, x: then(h, h.view(2, 2, 4).permute(2, 0, 1)[0].exp_()) * k,
    "moved": lambda h, k, x: then(h, h.movedim(0, 1).add_(k)),
    "selected": lambda h, k, x: then(h, h.select(1, 2).mul_(k[:, 0])),
    "narrowed": lambda h, k, x: then(h, h.narrow(0, 1, 2).copy_(k[:2])),
    "a diagonal": lambda h, k, x: then(h, h.diagonal().add_(k[0])),
    "filled diagonal": lambda h, k, x: h.fill_diagonal_(0.0) * h,
    "strides": lambda h, k, x: then(h, h.as_strided((4,), (5,)).mul_(3)) * k,
    "relu of a view": lambda h, k, x: then(h, F.relu(h[:, :2], inplace=True)) * k,
    "real parts": lambda h, k, x: (lambda z: then(z, z.real.mul_(2)))(torch.complex(h, k)).abs(),
    "other shapes": lambda h, k, x: h.unsqueeze_(1).squeeze_(1).t_().t() * k,
    "swapped halves": lambda h, k, x: write(write(h.clone(), (..., slice(2)), h[:, 2:]), 0, k[0]),
}

WRITES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "column": lambda h, k, x: write(write(torch.zeros_like(x), (..., 0), h[:, 1]), 1, k[0]),
    "by a mask": lambda h, k, x: write(h, x > 0, 0.0) * k,
    "rows of a mask": lambda h, k, x: write(h, x > 0, k[x > 0]),
    "by indices": lambda h, k, x: write(h, (torch.arange(4), torch.tensor([0, 1, 2, 3])), k[:, 0]),
    "every other": lambda h, k, x: write(h, (..., slice(None, None, 2)), k[:, :2]),
    "broadcast": lambda h, k, x: then(h, h[:2].copy_(k[0])),
    "added up": lambda h, k, x: h.index_put_((torch.tensor([0, 0, 1]),), k[:3], accumulate=True),
    "scattered": lambda h, k, x: h.scatter_(1, torch.tensor([[0], [1], [2], [0]]), k[:, :1]),
    "reduced": lambda h, k, x: h.scatter_reduce_(1, torch.zeros(4, 2).long(), k[:, :2], "amax"),
    "put": lambda h, k, x: h.put_(torch.tensor([0, 5]), k[0, :2]),
    "masked scatter": lambda h, k, x: h.masked_scatter_(x > 0, k),
    "filled with a tensor": lambda h, k, x: h.clone().fill_(k[0, 0]) * h,
    "zero, then more": lambda h, k, x: then(h, h[0].zero_()).add_(k),
    "lerp": lambda h, k, x: h.lerp_(x, torch.sigmoid(k)),
    "running sums": lambda h, k, x: h.cumsum_(0) * h * k,
    "lower triangle": lambda h, k, x: h.tril_() * k,
}


def without_gradient(body: Callable[..., Any]) -> Callable[..., Any]:
    """`body` in a block without gradients, and its operands behind it."""

    def inside(h: Tensor, k: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            made = body(h, x)
        return sum(made) * k + h  # type: ignore[no-any-return]

    return inside


BLOCKS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    name: without_gradient(body)
    for name, body in {
        "itself": lambda h, x: (h, h.to(h.dtype), h.contiguous(), h.type_as(x), h.to(x)),
        "nothing to do": lambda h, x: (h.flatten(1), torch.atleast_2d(h), torch.real(h)),
        "broadcast": lambda h, x: torch.broadcast_tensors(h, x),
        "no dropout": lambda h, x: (F.dropout(h, 0.5, False), nn.Identity()(h), h.positive()),
        "views": lambda h, x: (h.view(4, 4), h.reshape(4, 4), h.expand(4, 4), h[:], h.squeeze()),
        "copies": lambda h, x: (h.clone(), h.to(h.dtype, copy=True), torch.cat([h]), h * 1),
        "detached": lambda h, x: (h.detach(), h.detach().to(h.dtype)),
    }.items()
}

ALL = {**VIEWS, **WRITES, **BLOCKS}


@pytest.mark.parametrize("name", ALL)
def test_gradients_are_those_of_torch(name: str) -> None:
    model = made(ALL[name])
    check(model, model(X).detach())


# Drawn: steps on a growing list of tensors, all of which are read in the end.

Step = tuple[str, str, int, int]
MAKES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "t": lambda h, k: h.t(),
    "reshape": lambda h, k: h.reshape(-1).reshape(SIZE, SIZE),
    "slice": lambda h, k: h[:],
    "clone": lambda h, k: h.clone(),
    "to": lambda h, k: h.to(h.dtype),
    "contiguous": lambda h, k: h.contiguous(),
    "flatten": lambda h, k: h.flatten(1),
    "detach": lambda h, k: h.detach(),
    "data": lambda h, k: h.data * 1,
    "mul": lambda h, k: h * k,
    "tanh": lambda h, k: torch.tanh(h),
    "where": lambda h, k: torch.where(k > 0, h, k),
    "halves": lambda h, k: torch.cat([h[:, :2], k[:, 2:]], 1),
    "chunks": lambda h, k: torch.cat(h.chunk(2, 1)[::-1], 1),
}
CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul_": lambda h, k: h.mul_(k.clone()),
    "add_": lambda h, k: h.add_(k),
    "masked": lambda h, k: h.masked_fill_(k.detach() > 0, 0.3),
    "row": lambda h, k: write(h, 0, k[1]),
    "columns": lambda h, k: h[:, 1:3].add_(k[:, 1:3]),
    "transposed": lambda h, k: h.t().add_(1.0),
    "diagonal": lambda h, k: h.fill_diagonal_(0.2),
    "zero": lambda h, k: h[2].zero_(),
    "copy": lambda h, k: h.copy_(k),
    "detached": lambda h, k: h.detach().add_(1.0),
    "indices": lambda h, k: h.index_add_(0, torch.tensor([0, 0]), k[:2]),
}


class Drawn(Small):
    def __init__(self, steps: list[Step]) -> None:
        super().__init__(lambda h, k, x: None)
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        held = [self.one(x) * 1, self.two(x) * 1, x * 1]
        for block, name, first, second in self.steps:
            h, k = held[first % len(held)], held[second % len(held)]
            with torch.set_grad_enabled(block == "with a gradient"):
                if name in MAKES:
                    held.append(MAKES[name](h, k))
                else:
                    CHANGES[name](h, k)
        return torch.stack([h.square().mean() * (n + 1) for n, h in enumerate(held)]).sum()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["with a gradient", "without"]),
        st.sampled_from([*MAKES, *CHANGES]),
        st.integers(0, 7),
        st.integers(0, 7),
    ),
    min_size=2,
    max_size=6,
)


def is_right_or_refused(steps: list[Step]) -> None:
    model = made(Drawn(steps))
    try:
        expected = model(X.clone())
        expected.backward()
    except RuntimeError:  # torch itself refuses some
        return
    model.zero_grad()
    with contextlib.suppress(CaptureError):
        check(model, expected.detach())


@settings(max_examples=15, deadline=None)
@given(STEPS)
def test_drawn_programs_are_right_or_refused(steps: list[Step]) -> None:
    is_right_or_refused(steps)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_more_drawn_programs_are_right_or_refused(steps: list[Step]) -> None:
    is_right_or_refused(steps)


def test_what_a_block_writes_has_no_gradient_behind_it() -> None:
    """A moving average that the loss reads: found by a draw."""
    steps = [("without", "columns", 2, 0), ("with a gradient", "mul", 2, 1)]
    model = made(Drawn(steps))
    check(model, model(X.clone()).detach())


def test_a_value_has_the_gradient_of_what_was_written_into_it() -> None:
    """So that a block without gradients may not change it: found by a draw."""
    steps = [("with a gradient", "columns", 2, 1), ("without", "diagonal", 2, 0)]
    with pytest.raises(CaptureError, match=r"changes a tensor inside torch.no_grad"):
        capture(made(Drawn(steps)), {"x": X})


X = torch.linspace(-1.3, 1.7, SIZE * SIZE, dtype=torch.float64).reshape(SIZE, SIZE).sin()


def made(body: Any) -> Small:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = body if isinstance(body, Small) else Small(body)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter))
        return model.double()


def check(model: Small, loss: Tensor) -> None:
    """Holds loss and gradients of the captured program against those of the model."""
    with float64_everywhere():
        captured = capture(model, {"x": X})
    parameters, batch = dict(model.named_parameters()), {"x": X}
    mine, gradients = captured_step(captured.graph, captured.constants, parameters, {}, batch)
    torch.testing.assert_close(mine, loss, rtol=1e-12, atol=1e-13)
    model(X.clone()).backward()
    for name, parameter in parameters.items():
        zeros = torch.zeros_like(parameter)
        found, right = (zeros if g is None else g for g in (gradients[name], parameter.grad))
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)
