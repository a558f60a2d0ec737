"""The index comes back as it was; what contradicts itself is refused."""

import json
from typing import Any

import pytest

from meshfold.checkpoint_files.index import (
    Index,
    Piece,
    SavedGroup,
    SavedOptimizer,
    SavedTensor,
    index_from_bytes,
    index_to_bytes,
)
from meshfold.errors import MeshfoldError

PIECES = (Piece("a", 8, (0, 0), (1, 3)), Piece("b", 8, (1, 0), (1, 3)))
OPTIMIZER = SavedOptimizer("SGD", (SavedGroup(("w",), {"dict": []}),), {"w": {"step": 1}})
INDEX = Index(1, 4, {"model.w": SavedTensor("F32", (2, 3), PIECES)}, OPTIMIZER, {"dict": []})


def test_it_comes_back() -> None:
    assert index_from_bytes(index_to_bytes(INDEX), {"a", "b"}) == INDEX


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("version",), 2, "version '2', and this meshfold reads 1; load it with the meshfold that"),
        (("version",), [], r"version '\[\]'"),
        (("num_forwards",), "4", 'num_forwards: input should be a valid integer, found "4"'),
        (("more",), 1, "more: unknown field"),
        (("tensors", "model.w", "dtype"), "load", "do not make up a load tensor"),
        (("tensors", "model.w", "shape"), [2, 4], "do not make up"),
        (("tensors", "model.w", "shape"), [3], "the pieces of model.w do not fit it"),
        (("tensors", "model.w", "pieces", 0, "file"), "../a", "do not fit"),
        (("tensors", "model.w", "pieces", 0, "begin"), -1, "do not fit"),
        (("tensors", "model.w", "pieces", 0, "offsets"), [2, 0], "do not fit"),
        (("tensors", "model.w", "pieces", 0, "shape"), [-1, -3], "do not fit"),
    ],
)
def test_contradictions_are_refused(path: tuple[Any, ...], value: Any, words: str) -> None:
    data = json.loads(index_to_bytes(INDEX))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(MeshfoldError, match=words):
        index_from_bytes(json.dumps(data).encode(), {"a", "b"})


@pytest.mark.parametrize("text", [b"", b"\xff", b"{", b"[" * 100_000, b"1" * 10_000])
def test_what_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(MeshfoldError, match="no JSON|version"):
        index_from_bytes(text, set())
