"""Nested values come back as they were, or are refused by name."""

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshfold.checkpoint_files.values import decoded, encoded, renamed, tensor_names
from meshfold.errors import MeshfoldError, OptionError

KEYS = st.one_of(st.none(), st.booleans(), st.integers(), st.text())
LEAVES = st.one_of(KEYS, st.floats(allow_nan=False))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(KEYS, inner),
        st.lists(KEYS).map(Counter),
    ),
    max_leaves=12,
)


@given(VALUES)
def test_values_come_back_with_their_types(value: Any) -> None:
    node = json.loads(json.dumps(encoded(value, "extra", {})))
    found = decoded(node, {})
    assert repr(found) == repr(value)


def test_tensors_lie_beside() -> None:
    tensors: dict[str, Tensor] = {}
    array = np.arange(3, dtype=np.uint32)
    value = {"a": [torch.ones(2)], 1: (torch.tensor(2.0), array), "nan": math.nan}
    node = json.loads(json.dumps(encoded(value, "extra", tensors)))
    assert list(tensors) == tensor_names(node) == ["extra['a'][0]", "extra[1][0]", "extra[1][1]"]
    found = decoded(node, tensors)
    assert torch.equal(found["a"][0], torch.ones(2)) and found[1][0] == 2
    assert found[1][1].dtype == np.uint32 and (found[1][1] == array).all()
    assert math.isnan(found["nan"])


def deep() -> Any:
    value: list[Any] = []
    for _ in range(60):
        value = [value]
    return value


def cyclic() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": {1}}, r"extra\['a'\] is of type set; a checkpoint takes None, bool, int"),
        ({"a": print}, r"extra\['a'\] is of type builtin_function_or_method"),
        (OrderedDict(), "extra is of type OrderedDict"),
        ({(1, 2): 3}, r"extra has the key \(1, 2\); name it by a string or a number"),
        (np.array(["x"]), "extra is an array of <U1"),
        (torch.eye(2).to_sparse(), "extra is a Tensor of torch.float32, torch.sparse_coo"),
        (deep(), "nested deeper than 50"),
        (cyclic(), "nested deeper than 50"),
        ({1: torch.ones(1), "x": np.float64(1)}, r"extra\['x'\] is of type float64"),
    ],
)
def test_others_are_refused_by_name(value: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        encoded(value, "extra", {})


@pytest.mark.parametrize(
    "node", [{}, {"tensor": "x"}, {"tensor": 1}, {"dict": [[1]]}, {"dict": [[[], 1]]}, {"list": []}]
)
def test_what_was_not_written_is_refused(node: Any) -> None:
    with pytest.raises(MeshfoldError, match="is no value of a checkpoint; load another one"):
        decoded(node, {})


def test_tensors_get_other_names() -> None:
    value = {"a": [torch.zeros(1), (np.zeros(2), 3)], 4: None}
    tensors: dict[str, Tensor] = {}
    node = encoded(value, "extra", tensors)
    names = {name: name.replace("extra", "other") for name in tensors}
    assert renamed(node, names) == encoded(value, "other", {})
    assert tensor_names(renamed(node, names)) == list(names.values())
