"""Seeds, and answers of the world outside, which a graph of one call cannot hold."""

import datetime
import os
import time
from datetime import date
from time import perf_counter as clock

import pytest
import torch
from support.programs.linears import Linears, Middle, assert_refused, captured_line, with_middle
from torch import Tensor

from meshfold.capture.python_state.outside_world import spaces_of


def seeded(model: Linears, h: Tensor) -> Tensor:
    torch.manual_seed(0)
    return h + torch.rand_like(h)


def scaled_by_time(model: Linears, h: Tensor) -> Tensor:
    return h * (time.time() % 7)


def scaled_by_a_clock_of_another_name(model: Linears, h: Tensor) -> Tensor:
    return h * (clock() % 7)


def scaled_by_the_hour(model: Linears, h: Tensor) -> Tensor:
    return h * (1 + datetime.datetime.now().hour)


def scaled_by_the_day(model: Linears, h: Tensor) -> Tensor:
    return h * date.today().toordinal()


def tensor_of_time(model: Linears, h: Tensor) -> Tensor:
    return h * torch.tensor(time.monotonic_ns() % 1000)


def scaled_by_chance(model: Linears, h: Tensor) -> Tensor:
    return h * int.from_bytes(os.urandom(4))


def scaled_by_the_seed(model: Linears, h: Tensor) -> Tensor:
    return h * torch.initial_seed()


def timed(model: Linears, h: Tensor) -> Tensor:
    start = time.perf_counter()
    h = 2 * h
    model.took_s = time.perf_counter() - start
    return h


ASKS = "forward asks for the time or a seed, and computes something else with every answer"
MIDDLES = {
    seeded: "forward seeds torch's random numbers, which would be lost in a graph",
    scaled_by_time: ASKS,
    scaled_by_a_clock_of_another_name: ASKS,
    scaled_by_the_hour: ASKS,
    scaled_by_the_day: ASKS,
    tensor_of_time: ASKS,
    scaled_by_chance: ASKS,
    scaled_by_the_seed: ASKS,
    timed: "",
}


@pytest.mark.parametrize("middle", MIDDLES, ids=lambda f: f.__name__)
def test_what_forward_asks_for(middle: Middle) -> None:
    assert_refused(with_middle(Linears, middle), MIDDLES[middle])


def test_clocks_are_as_before() -> None:
    before = dict(globals())
    assert captured_line(with_middle(Linears, scaled_by_time))
    assert globals() == before


def test_files_of_a_model_are_those_of_its_classes_and_its_loss() -> None:
    model = with_middle(Linears, timed)
    found = {space["__name__"] for space in spaces_of(model, seeded)}
    assert __name__ in found and "support.programs.linears" in found
