"""What values hold, compared later."""

import copy
import dataclasses
import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshfold.capture.dedup.contents import content_of


@dataclasses.dataclass
class Config:
    rate: Any = 0.5


class NoTruth:
    """Cannot be asked whether it equals another."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = None  # type: ignore[assignment]


class NoTruthWithState(NoTruth):
    def __init__(self) -> None:
        self.rate = 2.0


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.fractions(), st.binary()
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner),
        st.dictionaries(st.text(), inner, max_size=3),
        st.builds(Config, inner),
        st.builds(lambda x: SimpleNamespace(rate=x), inner),
    ),
    max_leaves=8,
)


@given(VALUES)
def test_a_copy_holds_the_same(value: Any) -> None:
    assert content_of(copy.deepcopy(value), 20) == content_of(value, 20)
    assert hash(content_of(value)) == hash(content_of(value))


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (1, 1.0),
        (1, True),
        ([1], (1,)),
        ([1, 2], [1]),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1}),
        (Config(1), Config(2)),
        (Config([1]), Config([2])),
        (SimpleNamespace(a=1), SimpleNamespace(a=1, b=1)),
        (Fraction(1, 2), Fraction(1, 3)),
        (NoTruth(), NoTruth()),
        (np.arange(3), np.arange(3) + 1),
        (np.arange(3), np.arange(3.0)),
        (np.zeros(4), np.zeros((2, 2))),
        (np.array([1, None], object), np.array([2, None], object)),
        (torch.zeros(2), torch.zeros(2)),
        (nn.Linear(1, 1), nn.Linear(1, 1)),
        (0.0, -0.0),
    ],
)
def test_others_hold_something_else(value: Any, other: Any) -> None:
    assert content_of(value) != content_of(other)
    assert content_of(value) == content_of(value)


@pytest.mark.parametrize(
    "value",
    [math.nan, [np.full(2, math.nan)], Fraction(1, 2), torch.float32, NoTruthWithState(), Config()],
)
def test_equal_ones_hold_the_same(value: Any) -> None:
    assert content_of(copy.deepcopy(value)) == content_of(value)


def test_a_change_in_place_is_seen() -> None:
    array, tensor, config = np.zeros(1000), torch.zeros(2), Config([1])
    held: list[Any] = []
    held.append(held)  # holds itself
    objects = np.array([None, 1], object)
    objects[0] = objects
    for value, change in [
        (array, lambda: array.__setitem__(999, 1)),
        (tensor, lambda: tensor.add_(1)),
        (config, lambda: config.rate.append(2)),
        (held, lambda: held.append(1)),
        (objects, lambda: objects.__setitem__(1, 2)),
    ]:
        before = content_of(value)
        assert content_of(value) == before
        change()
        assert content_of(value) != before
