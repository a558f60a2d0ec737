"""What a model returned, made anew around other tensors."""

import pickle
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from support.models.returns import Output, Record
from torch import Tensor

from meshfold.capture.trace.returned import name_outputs
from meshfold.capture.trace.structures import filled_structure, structure_of
from meshfold.errors import CaptureError

X, Y = torch.zeros(2), torch.ones(3)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


class Plain:
    def __init__(self, x: Tensor, must_be_given: int) -> None:
        self.x, self.kind = x, must_be_given


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    scale: float = 2.0


@dataclass(slots=True)
class Slotted:
    x: Tensor
    name: str = "slotted"


STRUCTURES: list[Any] = [
    X,
    (X, None, Y),
    [X, {"a": Y}],
    {"loss": X, "n": 3, "deep": {"er": (Y,)}},
    OrderedDict(a=X),
    defaultdict(None, a=X, b=Y),
    deque([X, Y]),
    Pair(X, Y),
    Record(X, Y, (Y, X), "named"),
    Output(loss=X, hidden_states=(Y,)),
    Frozen(X),
    Slotted(X),
    Plain(X, 4),
]


@pytest.mark.parametrize("value", STRUCTURES, ids=lambda v: type(v).__name__)
def test_the_same_structure_comes_back(value: Any) -> None:
    named = name_outputs(value)
    structure = pickle.loads(pickle.dumps(structure_of(value)))
    again = filled_structure(structure, named)
    assert type(again) is type(value)
    assert name_outputs(again).keys() == named.keys()
    assert all(name_outputs(again)[name] is x for name, x in named.items())


def test_what_was_not_asked_for_is_none_and_no_entry_of_a_dict() -> None:
    made = filled_structure(structure_of({"a": X, "b": (X, Y), "n": 1}), {"b.1": Y})
    assert made == {"b": (None, Y), "n": 1}
    assert filled_structure(structure_of({"a": X, "b": (Y, Y)}), {"a": X}) == {"a": X}
    assert filled_structure(structure_of((X, [Y])), {"0": X}) == (X, None)
    made = filled_structure(structure_of(Output(loss=X, logits=Y)), {"loss": X})
    assert made.loss is X and made.logits is None and list(made) == ["loss"]


class Stubborn(dict[str, Tensor]):
    def __init__(self, one: Tensor, two: Tensor) -> None:
        super().__init__(one=one, two=two)


def test_a_class_that_cannot_be_made_is_named() -> None:
    with pytest.raises(
        CaptureError, match="returns a Stubborn, which cannot be made anew .*return"
    ):
        filled_structure(structure_of(Stubborn(X, Y)), {"one": X, "two": Y})
