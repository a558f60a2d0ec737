"""A checkpoint with more tensors than the one that it was made from: some are there several times,
under names of their own. Knows no model.

One file after the other is read, checked, and written with the copies, so that no more than one is
in memory. The rules of meshfold.checkpoint_files.folder hold: the new checkpoint is there whole, or
not at all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from meshfold.checkpoint_files.dtypes import DTYPES
from meshfold.checkpoint_files.folder import check_file, commit, prepared
from meshfold.checkpoint_files.index import (
    Index,
    Piece,
    SavedOptimizer,
    SavedTensor,
    index_to_bytes,
    read_index,
)
from meshfold.checkpoint_files.safetensors_files import read_part, write_pieces
from meshfold.checkpoint_files.values import renamed, tensor_names


def write_copies(
    folder: Path, out: Path, tensors: Mapping[str, str], optimizer: SavedOptimizer | None
) -> None:
    """Write to the folder `out` the checkpoint in `folder` with these tensors, new name -> old, and
    this optimizer; what the training goes on from besides (`extra`) is the same.

    Raises MeshfoldError, and leaves no checkpoint in `out` that was not there before.
    """
    index, digests = read_index(folder)
    copies: dict[str, list[str]] = {}
    for new, old in tensors.items():
        copies.setdefault(old, []).append(new)
    target = prepared(out)
    try:
        found: dict[str, SavedTensor] = {}
        written: dict[str, str] = {}
        for k, file in enumerate(sorted(digests)):
            check_file(folder / file, digests[file])
            name = target.shard_name(k, len(digests))
            written[name] = _copy_file(folder / file, target.working / name, index, copies, found)
        commit(target, index_to_bytes(replace(index, tensors=found, optimizer=optimizer)), written)
    except BaseException:  # Ctrl-C, too
        target.clear()
        raise


def _copy_file(
    source: Path,
    path: Path,
    index: Index,
    copies: Mapping[str, Sequence[str]],
    found: dict[str, SavedTensor],
) -> str:
    """Write the pieces of one file as often as they are wanted, and add them to `found`. copies:
    old name -> new ones. Returns the sha256 of the new file."""
    pieces: dict[str, tuple[tuple[int, ...], torch.Tensor]] = {}
    old_of: dict[str, str] = {}
    for old, news in copies.items():
        saved = index.tensors[old]
        for piece in saved.pieces:
            if piece.file == source.name:
                content = torch.empty(piece.shape, dtype=DTYPES[saved.dtype])
                read_part(source.parent, replace(saved, pieces=(piece,)), piece.offsets, content)
                pieces |= dict.fromkeys(news, (piece.offsets, content))
                old_of |= dict.fromkeys(news, old)
    digest, begins = write_pieces(path, pieces)
    for new, (offsets, content) in pieces.items():
        saved = index.tensors[old_of[new]]
        before = found[new].pieces if new in found else ()
        piece = Piece(path.name, begins[new], offsets, tuple(content.shape))
        found[new] = SavedTensor(saved.dtype, saved.shape, (*before, piece))
    return digest


def copied_optimizer(
    saved: SavedOptimizer, parameters: Mapping[str, str]
) -> tuple[SavedOptimizer, dict[str, str]]:
    """The optimizer of these parameters, new name -> old: a copy of the states and in the groups of
    the old one. Also the tensors that it needs, new name -> old."""
    news: dict[str, list[str]] = {}
    for new, old in parameters.items():
        news.setdefault(old, []).append(new)
    groups = tuple(
        replace(
            group,
            parameters=tuple(sorted(n for old in group.parameters for n in news.get(old, ()))),
        )
        for group in saved.groups
    )
    tensors = {name: name for group in saved.groups for name in tensor_names(group.options)}
    state: dict[str, dict[str, object]] = {}
    for new, old in parameters.items():
        if old not in saved.state:
            continue
        state[new] = {}
        for key, node in saved.state[old].items():
            names = {
                where: f"optimizer.{new}{where.removeprefix(f'optimizer.{old}')}"
                for where in tensor_names(node)
            }
            tensors |= {name: where for where, name in names.items()}
            state[new][key] = renamed(node, names)
    return SavedOptimizer(saved.kind, groups, state), tensors
