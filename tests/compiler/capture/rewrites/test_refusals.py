"""Models that go step by step through a sequence are refused, loops that look alike are not; and
random numbers that ranks would not agree on."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshfold.capture.pipeline import capture
from meshfold.capture.rewrites.refusals import MOST_STEPS
from meshfold.errors import CaptureError, UnsupportedOpError


class Loop(nn.Module):
    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x).sum()


def decayed(model: nn.Module, x: Tensor) -> Tensor:
    state, decay = torch.zeros_like(x[:, 0]), model.inner(x).sigmoid()
    for i in range(x.shape[1]):
        state = decay[:, i] * state + x[:, i]
    return state


def gated(model: nn.Module, x: Tensor) -> Tensor:
    state = torch.zeros_like(x[:, 0])
    for i in range(x.shape[1]):
        state = torch.tanh(model.inner(state) + model.outer(x[:, i]))
    return state


def sliced(model: nn.Module, x: Tensor) -> Tensor:
    state = model.inner(x[:, :1])
    for i in range(1, x.shape[1]):
        state = (state * x[:, i : i + 1]).sin()
    return state


def summed(model: nn.Module, x: Tensor) -> Tensor:
    total = model.inner(x[:, 0])
    for i in range(1, x.shape[1]):
        total = total + x[:, i] * i
    return total


def joined(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([x[:, i].sin() for i in range(x.shape[1])], -1) * model.inner.weight.sum()


def sequence(length: int) -> dict[str, Tensor]:
    return {"x": torch.randn(2, length, 4)}


@pytest.mark.parametrize("function", [decayed, gated, sliced], ids=lambda f: f.__name__)
def test_a_state_that_is_carried_through_a_sequence_is_refused(
    function: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    with pytest.raises(CaptureError, match="one by one, which would be some") as caught:
        capture(Loop(function), sequence(MOST_STEPS + 1))
    forward = inspect.getsourcelines(Loop.forward)[1]
    assert caught.value.source == f"{__file__}:{forward + 1}"
    assert caught.value.op in ("aten.select.int", "aten.slice.Tensor")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("function", [summed, joined], ids=lambda f: f.__name__)
def test_terms_of_a_sum_and_pieces_of_a_whole_are_no_state(
    function: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    capture(Loop(function), sequence(2 * MOST_STEPS))


def test_a_few_steps_are_captured() -> None:
    assert capture(Loop(gated), sequence(MOST_STEPS - 1)).graph.num_ops > 3 * (MOST_STEPS - 1)


DRAWS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "multinomial": lambda _, x: x[..., torch.multinomial(torch.ones(4), 4, True)],
    "poisson": lambda _, x: x + torch.poisson(x.detach().abs()),
    "randn": lambda _, x: x + torch.randn(x.shape, dtype=torch.complex64).real,
    "randperm": lambda _, x: x[torch.randperm(len(x))],
    "rrelu": lambda _, x: functional.rrelu(x, training=True),
    "_standard_gamma": lambda _, x: x * torch._standard_gamma(x.detach().abs() + 1),
}


@pytest.mark.parametrize("op", DRAWS)
def test_random_numbers_without_a_rule_are_refused_with_their_line(op: str) -> None:
    with pytest.raises(UnsupportedOpError, match="draws random numbers") as caught:
        capture(Loop(lambda model, x: DRAWS[op](model, model.inner(x))), sequence(4))
    assert caught.value.op.startswith(f"aten.{op}")
    forward = inspect.getsourcelines(Loop.forward)[1]
    assert caught.value.source == f"{__file__}:{forward + 1}"
    assert "\n" not in str(caught.value)
