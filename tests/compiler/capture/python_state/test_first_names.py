"""Children and parameters that forward moves: what a later call reads is told by first names."""

from collections.abc import Callable

import pytest
import torch
from support.programs.linears import Linears, assert_refused, assert_trains_alike
from torch import Tensor, nn


class Moving(Linears):
    """Does something to its members in every forward."""

    def __init__(self, move: Callable[["Moving"], object]) -> None:
        super().__init__()
        self.move = move
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale, self.shift = (nn.Parameter(torch.rand(4)) for _ in range(2))
        self.named = nn.ModuleDict()
        self.more = nn.ModuleList([nn.Linear(4, 4), nn.Tanh()])
        self.is_done = False

    def middle(self, h: Tensor) -> Tensor:
        self.move(self)
        h = self.right(self.left(h) * self.scale + self.shift)
        for one in self.more:
            h = one(h)
        return h


def exchange(model: Moving) -> None:
    model.left, model.right = model.right, model.left


def exchange_parameters(model: Moving) -> None:
    model.scale, model.shift = model.shift, model.scale


def exchange_in_a_list(model: Moving) -> None:
    model.more[0], model.left = model.left, model.more[0]


def grow(model: Moving) -> None:
    model.more.append(model.more[1])


def grow_a_dict(model: Moving) -> None:
    model.named[str(len(model.named))] = model.more[1]


def exchange_once(model: Moving) -> None:
    if not model.is_done:
        exchange(model)
    model.is_done = True


def tie(model: Moving) -> None:
    model.left.weight = model.right.weight


def drop(model: Moving) -> None:
    del model.more[1:]


@pytest.mark.parametrize(
    ("move", "name"),
    [
        (exchange, "left"),
        (exchange_parameters, "scale"),
        (exchange_in_a_list, "left"),
        (grow, "more.2"),
        (grow_a_dict, "named.0"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_members_that_move_with_every_call_are_refused(
    move: Callable[[Moving], object], name: str
) -> None:
    assert_refused(Moving(move), f"forward changes what {name} holds, and its next call computes")


def test_modules_with_two_names_stay() -> None:
    """For which an export has stand-ins, new ones whenever they are asked for."""

    def count(model: Moving) -> None:
        model.counted = len(model.more)  # type: ignore[assignment]

    model = Moving(count)
    model.again = model.left
    assert_refused(model, "")


@pytest.mark.parametrize("move", [exchange_once, tie, drop], ids=lambda f: f.__name__)
def test_members_that_stay_after_the_first_call_are_captured(
    move: Callable[[Moving], object],
) -> None:
    assert_trains_alike(Moving(move))
