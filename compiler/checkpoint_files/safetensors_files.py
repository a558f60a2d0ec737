"""Pieces of tensors in a safetensors file, written and read without that package and without
pickle. The index says where a piece lies; the header is for other readers.

8 bytes, the length of the header; the header, JSON; the pieces without gaps, the widest dtypes
first, so that all are aligned. Offsets of pieces are given as torch.distributed.checkpoint's
HuggingFaceStorageReader expects them.
"""

import hashlib
import json
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from meshfold.checkpoint_files.dtypes import DTYPES, NAMES
from meshfold.checkpoint_files.folder import REMEDY, new_file, regular_file
from meshfold.checkpoint_files.index import Piece, SavedTensor
from meshfold.errors import MeshfoldError


def write_pieces(
    path: Path, pieces: Mapping[str, tuple[tuple[int, ...], Tensor]]
) -> tuple[str, dict[str, int]]:
    """Write pieces (offsets in their tensor, contents) by name of the tensor.

    Returns the file's sha256, and where in the file each piece begins. Raises MeshfoldError.
    """
    names = sorted(pieces, key=lambda name: -pieces[name][1].itemsize)
    entries, begins, end = {}, {}, 0
    for name in names:
        content = pieces[name][1]
        begins[name], end = end, end + content.nbytes
        entries[name] = {
            "dtype": NAMES[content.dtype],
            "shape": list(content.shape),
            "data_offsets": [begins[name], end],
        }
    offsets = {name: {"saved_offsets": list(pieces[name][0])} for name in names}
    metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}
    header = json.dumps({"__metadata__": metadata, **entries}).encode()
    header += b" " * (-len(header) % 8)
    start = len(header).to_bytes(8, "little") + header
    digest = hashlib.sha256(start)
    with new_file(path) as file:
        file.write(start)
        for name in names:
            data = bytes_of(pieces[name][1])
            digest.update(data)
            file.write(data)
    return digest.hexdigest(), {name: len(start) + begin for name, begin in begins.items()}


def bytes_of(content: Tensor) -> memoryview:
    """The contents of a tensor, row-major, on the host."""
    flat = content.detach().cpu().contiguous().resolve_conj().resolve_neg().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def read_part(folder: Path, saved: SavedTensor, offsets: tuple[int, ...], part: Tensor) -> None:
    """Fill `part`, the box of a tensor that begins at `offsets`. Raises MeshfoldError."""
    for piece in saved.pieces:
        sides = zip(piece.offsets, piece.shape, offsets, part.shape, strict=True)
        box = [(max(a, b), min(a + n, b + m)) for a, n, b, m in sides]
        if any(low >= high for low, high in box):
            continue
        target = part[_within(box, offsets)]
        first, last = box[0] if box else (0, 0)
        rows = _rows(folder, saved.dtype, piece, first, last)
        target.copy_(rows[_within(box, (first, *piece.offsets[1:]) if box else ())])


def _within(box: list[tuple[int, int]], offsets: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for (a, b), o in zip(box, offsets, strict=True))


def _rows(folder: Path, dtype: str, piece: Piece, first: int, last: int) -> Tensor:
    """The rows `first` up to `last` of the tensor that a piece has; all of one without dims."""
    kind, rest = DTYPES[dtype], piece.shape[1:]
    row_bytes = prod(rest) * kind.itemsize
    data = bytearray((last - first) * row_bytes if piece.shape else row_bytes)
    with regular_file(folder / piece.file) as file:
        file.seek(piece.begin + (first - (piece.offsets[0] if piece.shape else 0)) * row_bytes)
        if file.readinto(data) != len(data):
            raise MeshfoldError(f"{folder / piece.file}: ends too early; {REMEDY}")
    shape = (last - first, *rest) if piece.shape else ()
    return torch.frombuffer(data, dtype=kind).reshape(shape)
