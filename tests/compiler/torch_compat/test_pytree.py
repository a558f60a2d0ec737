"""Nested containers: paths of leaves, and the same containers around other leaves."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from meshfold.torch_compat.pytree import (
    TensorSlot,
    fill_slots,
    flat,
    map_leaves,
    map_named,
    named_contents,
    named_leaves,
)

Pair = namedtuple("Pair", ["left", "right"])
X, Y = torch.zeros(1), torch.ones(2)


@dataclass
class Known:
    left: Any
    right: Any


@dataclass
class Unknown:
    left: Any


torch.export.register_dataclass(Known, serialized_type_name="tests.Known")

CONTAINERS = [
    ({"a": {1: X}, "b": None}, ["a.1", "b"]),
    ([X, [Y, 3]], ["0", "1.0", "1.1"]),
    ((X, ((Y,),)), ["0", "1.0.0"]),
    (Pair(X, [Y]), ["left", "right.0"]),
    (Known(X, (Y, 2)), ["left", "right.0", "right.1"]),
    (OrderedDict(b=X, a=Y), ["b", "a"]),
    ({"empty": [], "x": X}, ["x"]),
    (X, [""]),
]


@pytest.mark.parametrize(("tree", "paths"), CONTAINERS)
def test_leaves_are_named_by_their_path(tree: Any, paths: list[str]) -> None:
    assert [path for path, _ in named_leaves(tree)] == paths
    assert [path for path, _ in named_contents(tree)] == paths


@pytest.mark.parametrize(("tree", "paths"), CONTAINERS)
def test_containers_stay_around_other_leaves(tree: Any, paths: list[str]) -> None:
    named = map_named(lambda path, _: path, tree)
    assert type(named) is type(tree) if paths != [""] else named == ""
    assert [leaf for _, leaf in named_leaves(named)] == paths
    slots = iter(range(len(paths)))
    template = map_leaves(lambda _: TensorSlot(next(slots)), tree)
    assert flat(fill_slots(template, paths)) == flat(named)


@pytest.mark.parametrize(
    "leaf",
    [None, torch.Size([1, 2]), Unknown(X), MappingProxyType({"a": X}), X.max(dim=0), iter(())],
    ids=lambda leaf: type(leaf).__name__,
)
def test_anything_else_is_a_leaf(leaf: Any) -> None:
    assert named_leaves({"of": leaf}) == [("of", leaf)]


def test_equal_containers_are_told_from_others() -> None:
    trees: list[Any] = [(1, 2), [1, 2], Pair(1, 2), {"a": 1, "b": 2}, {"b": 1, "a": 2}, [1, [2]]]
    assert len({flat(tree)[1] for tree in trees}) == len(trees)
    assert flat([X, {"a": 3}])[1] == flat([Y, {"a": 4}])[1]


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (
            BaseModelOutput(last_hidden_state=X, hidden_states=(Y, X)),
            ["last_hidden_state", "hidden_states.0", "hidden_states.1"],
        ),
        (Unknown([X, MappingProxyType({"k": Y})]), ["left.0", "left.1.k"]),
        (SimpleNamespace(inner=Pair(X, Y)), ["inner.left", "inner.right"]),
        (torch.ones(2, 2).max(dim=0), ["0", "1"]),
        ([torch.Size([4])], []),
    ],
    ids=["model output", "dataclass", "object", "structure", "sizes"],
)
def test_contents_open_mappings_and_objects(value: Any, names: list[str]) -> None:
    found = [path for path, x in named_contents(value) if isinstance(x, torch.Tensor)]
    assert found == names
