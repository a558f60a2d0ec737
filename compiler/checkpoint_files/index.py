"""The index of a checkpoint: what tensors there are, where their pieces lie, and all that is no
tensor, as frozen records and as JSON."""

import json
from collections.abc import Mapping, Set
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from pydantic_core import ValidationError
from pydantic_core.core_schema import any_schema

from meshfold.checkpoint_files.dtypes import DTYPES
from meshfold.checkpoint_files.folder import REMEDY, read_checked, read_checksums
from meshfold.errors import MeshfoldError
from meshfold.plan_file.records import Records, Special, first_fault

VERSION = 1


@dataclass(frozen=True)
class Piece:
    """A box of a tensor (offsets, shape), row-major in `file` from byte `begin` on."""

    file: str
    begin: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class SavedTensor:
    """dtype: as safetensors names it; shape: of the whole tensor, which the pieces make up."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class SavedGroup:
    """A parameter group: names of its parameters; options (lr and the like): an encoded dict."""

    parameters: tuple[str, ...]
    options: Any


@dataclass(frozen=True)
class SavedOptimizer:
    """kind: the name of its class; state: by parameter and key, encoded (values.py)."""

    kind: str
    groups: tuple[SavedGroup, ...]
    state: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Index:
    """tensors: those of the model by "model.NAME", others by the names in encoded values."""

    version: int
    num_forwards: int
    tensors: Mapping[str, SavedTensor]
    optimizer: SavedOptimizer | None
    extra: Any


_RECORDS = Records({Any: Special(any_schema(), lambda value: value)}, {})
_INDEX = _RECORDS.validator(Index)


def read_index(folder: Path) -> tuple[Index, dict[str, str]]:
    """The index of the checkpoint in a folder, found whole, and the sha256 of its other files by
    name. Raises MeshfoldError where there is none, or one that is damaged."""
    name, digests = read_checksums(folder)
    text = read_checked(folder / name, digests.pop(name))
    try:
        return index_from_bytes(text, digests.keys()), digests
    except MeshfoldError as error:
        raise MeshfoldError(f"{folder / name}: {error}; {REMEDY}") from error


def index_to_bytes(index: Index) -> bytes:
    """JSON, in UTF-8."""
    return json.dumps(_RECORDS.write(index)).encode()


def index_from_bytes(text: bytes, files: Set[str]) -> Index:
    """The index in `text`, whose pieces are in `files`. Raises MeshfoldError with what is wrong:
    no JSON, another version, a field, a piece outside of its tensor."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MeshfoldError(f"no JSON ({error})") from error
    version = data.get("version") if isinstance(data, dict) else None
    if version != VERSION:
        raise MeshfoldError(
            f"version {str(version)[:40]!r}, and this meshfold reads {VERSION}; load it with the "
            "meshfold that wrote it"
        )
    try:
        index: Index = _INDEX.validate_python(data)
    except ValidationError as error:
        raise MeshfoldError(first_fault(error)) from error
    for name, tensor in index.tensors.items():
        if not all(_fits(piece, tensor, files) for piece in tensor.pieces):
            raise MeshfoldError(f"the pieces of {name} do not fit it")
        if tensor.dtype not in DTYPES or sum(prod(p.shape) for p in tensor.pieces) != prod(
            tensor.shape
        ):
            raise MeshfoldError(f"the pieces of {name} do not make up a {tensor.dtype} tensor")
    return index


def _fits(piece: Piece, tensor: SavedTensor, files: Set[str]) -> bool:
    return (
        piece.file in files
        and piece.begin >= 0
        and len(piece.offsets) == len(piece.shape) == len(tensor.shape)
        and all(
            0 <= offset and 0 <= size and offset + size <= whole
            for offset, size, whole in zip(piece.offsets, piece.shape, tensor.shape, strict=True)
        )
    )
