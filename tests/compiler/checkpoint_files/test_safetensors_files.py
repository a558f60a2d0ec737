"""Pieces are read back box by box, by this package and by others."""

import hashlib
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from meshfold.checkpoint_files.dtypes import NAMES
from meshfold.checkpoint_files.index import Piece, SavedTensor
from meshfold.checkpoint_files.safetensors_files import read_part, write_pieces
from meshfold.errors import MeshfoldError

WHOLE = torch.arange(6 * 5).reshape(6, 5)


def saved(folder: Path, dtype: torch.dtype = torch.int64) -> SavedTensor:
    """WHOLE in two files, cut between columns."""
    pieces = []
    for name, first, last in (("a.safetensors", 0, 2), ("b.safetensors", 2, 5)):
        part = WHOLE.to(dtype)[:, first:last]
        others = {"x": ((), torch.tensor(True)), "y": ((0,), torch.zeros(3, dtype=torch.int16))}
        mine = {"w": ((0, first), part), **(others if first else {})}
        digest, begins = write_pieces(folder / name, mine)
        assert digest == hashlib.sha256((folder / name).read_bytes()).hexdigest()
        assert begins["w"] % part.itemsize == 0
        pieces.append(Piece(name, begins["w"], (0, first), tuple(part.shape)))
    return SavedTensor(NAMES[dtype], (6, 5), tuple(pieces))


@settings(max_examples=30)
@given(st.data())
def test_any_box_is_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("boxes")
    offsets = tuple(data.draw(st.integers(0, n)) for n in WHOLE.shape)
    ends = [data.draw(st.integers(o, n)) for o, n in zip(offsets, WHOLE.shape, strict=True)]
    part = torch.full([e - o for e, o in zip(ends, offsets, strict=True)], -1)
    read_part(folder, saved(folder), offsets, part)
    assert torch.equal(part, WHOLE[offsets[0] : ends[0], offsets[1] : ends[1]])


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
@pytest.mark.parametrize("dtype", NAMES)
def test_every_dtype_comes_back(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.arange(prod(shape)).reshape(shape).to(dtype)
    _, begins = write_pieces(tmp_path / "a", {"w": ((0,) * len(shape), value)})
    piece = Piece("a", begins["w"], (0,) * len(shape), shape)
    found = torch.ones(shape).to(dtype)
    read_part(tmp_path, SavedTensor(NAMES[dtype], shape, (piece,)), piece.offsets, found)
    assert torch.equal(found.view(dtype), value)
    if dtype is not torch.complex128:
        assert torch.equal(load_file(tmp_path / "a")["w"], value)


def test_a_view_is_written_as_it_is_read(tmp_path: Path) -> None:
    value = torch.arange(6.0).reshape(2, 3).to(torch.complex64).t().conj()
    write_pieces(tmp_path / "a", {"w": ((0, 0), value)})
    assert torch.equal(load_file(tmp_path / "a")["w"], value)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_puts_the_pieces_together(tmp_path: Path) -> None:
    saved(tmp_path)
    state = {"w": torch.zeros_like(WHOLE)}
    load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert torch.equal(state["w"], WHOLE)


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    tensor = saved(tmp_path)
    with (tmp_path / "b.safetensors").open("ab") as file:
        file.truncate(tensor.pieces[1].begin + 3)
    with pytest.raises(MeshfoldError, match="b.safetensors: ends too early; load another"):
        read_part(tmp_path, tensor, (0, 0), torch.zeros(6, 5))
