"""Tensors are copied under new names, pieces in their places; states follow their parameters."""

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from meshfold.checkpoint_files.copies import copied_optimizer, write_copies
from meshfold.checkpoint_files.folder import commit, prepared
from meshfold.checkpoint_files.index import (
    Index,
    Piece,
    SavedGroup,
    SavedOptimizer,
    SavedTensor,
    index_to_bytes,
    read_index,
)
from meshfold.checkpoint_files.safetensors_files import read_part, write_pieces
from meshfold.errors import MeshfoldError

WHOLE = torch.arange(6.0).reshape(3, 2)


def saved(folder: Path) -> Path:
    """WHOLE as "w" on two ranks, two rows and one, and a number on the first."""
    target = prepared(folder)
    parts = [{"w": ((0, 0), WHOLE[:2]), "n": ((), torch.tensor(7))}, {"w": ((2, 0), WHOLE[2:])}]
    pieces: dict[str, list[Piece]] = {"w": [], "n": []}
    digests = {}
    for rank, part in enumerate(parts):
        name = target.shard_name(rank, 2)
        digests[name], begins = write_pieces(target.working / name, part)
        for key, (offsets, x) in part.items():
            pieces[key].append(Piece(name, begins[key], offsets, tuple(x.shape)))
    tensors = {
        "w": SavedTensor("F32", (3, 2), tuple(pieces["w"])),
        "n": SavedTensor("I64", (), tuple(pieces["n"])),
    }
    commit(target, index_to_bytes(Index(1, 5, tensors, None, {"dict": []})), digests)
    return folder


def test_copies_are_whole_and_on_as_many_files(tmp_path: Path) -> None:
    source, out = saved(tmp_path / "a"), tmp_path / "b"
    write_copies(source, out, {"x": "w", "y": "w", "n": "n"}, None)
    index, digests = read_index(out)
    assert sorted(index.tensors) == ["n", "x", "y"] and index.num_forwards == 5
    assert [len(index.tensors[name].pieces) for name in ("n", "x", "y")] == [1, 2, 2]
    for name in ("x", "y"):
        whole = torch.zeros(3, 2)
        read_part(out, index.tensors[name], (0, 0), whole)
        assert torch.equal(whole, WHOLE)
    for file, digest in digests.items():
        assert sha256((out / file).read_bytes()).hexdigest() == digest
    places = {(p.file, p.begin) for name in ("x", "y") for p in index.tensors[name].pieces}
    assert len(places) == 4  # bytes of their own


@pytest.mark.parametrize("error", [MeshfoldError, KeyboardInterrupt])
def test_a_copy_that_dies_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    source = saved(tmp_path / "a")

    def full(*_: object) -> None:
        raise error("no space")

    monkeypatch.setattr("meshfold.checkpoint_files.copies.commit", full)
    with pytest.raises(error, match="no space"):
        write_copies(source, tmp_path / "b", {"x": "w"}, None)
    assert [f.name for f in tmp_path.iterdir()] == ["a"]


def test_states_are_those_of_the_parameter_copied_from() -> None:
    node = {"tensor": "optimizer.w.exp_avg"}
    state = {"w": {"exp_avg": node, "step": 3}, "v": {}}
    options = {"dict": [["lr", {"tensor": "optimizer.groups[0]['lr']"}]]}
    given = SavedOptimizer("AdamW", (SavedGroup(("v", "w"), options),), state)
    made, tensors = copied_optimizer(given, {"b": "w", "a": "w", "v": "v"})
    assert made == replace(
        given,
        groups=(SavedGroup(("a", "b", "v"), options),),
        state={
            "b": {"exp_avg": {"tensor": "optimizer.b.exp_avg"}, "step": 3},
            "a": {"exp_avg": {"tensor": "optimizer.a.exp_avg"}, "step": 3},
            "v": {},
        },
    )
    assert tensors == {
        "optimizer.groups[0]['lr']": "optimizer.groups[0]['lr']",
        "optimizer.a.exp_avg": "optimizer.w.exp_avg",
        "optimizer.b.exp_avg": "optimizer.w.exp_avg",
    }
