"""Arguments as data: pack, fill, compare."""

from collections import namedtuple
from typing import Any

import pytest
import torch

from meshfold.capture.dedup.arguments import NotPlainError, comparable, pack
from meshfold.torch_compat.pytree import TensorSlot, fill_slots

A, B = torch.zeros(2), torch.ones(3)
Pair = namedtuple("Pair", ["left", "right"])


def test_a_tensor_passed_twice_is_one_slot() -> None:
    template, tensors = pack(((A, B), {"again": A, "n": 3}))
    assert [id(t) for t in tensors] == [id(A), id(B)]
    assert template == ((TensorSlot(0), TensorSlot(1)), {"again": TensorSlot(0), "n": 3})


def test_filling_is_the_inverse_with_other_tensors() -> None:
    value = {"a": [A, (B, None)], "pair": Pair(A, 1.5), "empty": ()}
    template, tensors = pack(value)
    other = fill_slots(template, [t + 1 for t in tensors])
    assert torch.equal(other["a"][0], A + 1)
    assert isinstance(other["pair"], Pair)
    assert (other["a"][1][1], other["pair"].right, other["empty"]) == (None, 1.5, ())


@pytest.mark.parametrize("value", [object(), {"cache": [object()]}, iter(())])
def test_other_objects_are_refused(value: Any) -> None:
    with pytest.raises(NotPlainError):
        pack(value)


def test_comparable_tells_types_apart() -> None:
    values: list[Any] = [1, 1.0, True, "1", None, (1,), [1], {"a": 1}, {"a": 1.0}, torch.float32]
    assert len({comparable(v) for v in values}) == len(values)
    assert comparable(float("nan")) == comparable(float("nan"))
    assert comparable(0.0) != comparable(-0.0)
