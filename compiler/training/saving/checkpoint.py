"""Checkpoints of a CompiledModel and its optimizer, from plan to plan.

    save   every rank writes pieces of its shards; they become the checkpoint in one step
    load   into any plan of the model: other mesh, other stages, other number of processes; all of
           it or, where anything is damaged or does not fit, nothing

How a folder is made up and what survives a save that dies: meshfold.checkpoint_files.folder.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshfold.checkpoint_files.dtypes import DTYPES, NAMES
from meshfold.checkpoint_files.folder import (
    REMEDY,
    check_file,
    commit,
    prepared,
)
from meshfold.checkpoint_files.index import (
    VERSION,
    Index,
    Piece,
    SavedOptimizer,
    SavedTensor,
    index_to_bytes,
    read_index,
)
from meshfold.checkpoint_files.safetensors_files import bytes_of, read_part, write_pieces
from meshfold.checkpoint_files.values import decoded, encoded, tensor_names
from meshfold.distributed.agreement import agreed, gathered
from meshfold.errors import MeshfoldError, OptionError
from meshfold.torch_compat.dtensor import empty_as, part_of
from meshfold.training.compiled_model import CompiledModel
from meshfold.training.saving.optimizer_state import (
    State,
    check_optimizer,
    encoded_optimizer,
    localized,
    merged,
    restore,
    state_of,
)

MODEL = "model."


@dataclass(frozen=True)
class _Offer:
    """What a rank has to save. pieces: of tensors, by name and where in it they begin; shared: a
    digest of what is the same on all ranks."""

    pieces: Mapping[tuple[str, tuple[int, ...]], "_OfferedPiece"]
    optimizer: SavedOptimizer | None
    extra: Any
    shared: str


class _OfferedPiece(NamedTuple):
    """shape: of the piece; whole: of its tensor; dtype: as safetensors names it."""

    dtype: str
    whole: tuple[int, ...]
    shape: tuple[int, ...]


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: CompiledModel,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
) -> None:
    """Save parameters, buffers, optimizer states, the count of forward passes that dropout draws
    from, and `extra`: whatever else the training goes on from (step, scheduler, random states), the
    same on all ranks; see meshfold.checkpoint_files.values for what it may hold.

    Called on all ranks together; they share the folder's file system. A checkpoint that was in
    `folder` is replaced when the new one is complete, other files in there stay. Raises on all
    ranks: MeshfoldError where something else is in the way or one rank cannot write, OptionError
    for what cannot be saved.
    """
    _check_bound(model)
    own = {MODEL + name: x for name, x in model.state_dict().items()}
    state = state_of(model, optimizer) if optimizer is not None else {}
    offers = gathered(lambda: _offer(model, optimizer, state, own, extra))
    if len({offer.shared for offer in offers}) > 1:
        raise OptionError(
            f"{folder}: `extra` or the options of the optimizer's groups differ between ranks; "
            "save what differs as a list with one entry per rank, the same on all ranks"
        )
    target = gathered(lambda: prepared(Path(folder)) if _rank() == 0 else None)[0]
    assert target is not None
    writers = _writers(offers)
    mine = {
        name: (offsets, part)
        for name, (offsets, part) in ((name, part_of(x)) for name, x in own.items())
        if writers.get((name, offsets)) == _rank()
    }
    path = target.working / target.shard_name(_rank(), len(offers))
    try:
        written = gathered(lambda: write_pieces(path, mine))
        names = [target.shard_name(rank, len(offers)) for rank in range(len(offers))]
        digests = {name: digest for name, (digest, _) in zip(names, written, strict=True)}
        begins = {name: begin for name, (_, begin) in zip(names, written, strict=True)}
        index = _index(model, offers, {key: names[rank] for key, rank in writers.items()}, begins)
        agreed(lambda: commit(target, index, digests) if _rank() == 0 else None)
    except MeshfoldError:
        if _rank() == 0:
            target.clear()
        raise


def _offer(
    model: CompiledModel,
    optimizer: torch.optim.Optimizer | None,
    state: State,
    own: dict[str, Tensor],
    extra: Any,
) -> _Offer:
    """What this rank has, after its tensors were put into `own`. Raises OptionError."""
    shared: dict[str, Tensor] = {}
    node = encoded(extra, "extra", shared)
    saved = encoded_optimizer(model, optimizer, state, shared, own) if optimizer else None
    options = [group.options for group in saved.groups] if saved else None
    digest = hashlib.sha256(json.dumps([node, options, model.num_forwards]).encode())
    for x in shared.values():
        digest.update(repr((x.dtype, x.shape)).encode() + bytes_of(x))
    own |= shared
    pieces = {}
    for name, x in own.items():
        offsets, part = part_of(x)
        if x.dtype not in NAMES:
            raise OptionError(f"{name} is of {x.dtype}, which safetensors does not hold")
        if part.numel() > 0:
            pieces[name, offsets] = _OfferedPiece(NAMES[x.dtype], tuple(x.shape), tuple(part.shape))
    return _Offer(pieces, saved, node, digest.hexdigest())


def _writers(offers: Sequence[_Offer]) -> dict[tuple[str, tuple[int, ...]], int]:
    """Which rank writes a piece: of those that hold it the one with the least to write so far."""
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, offer in enumerate(offers):
        for key in offer.pieces:
            holders.setdefault(key, []).append(rank)
    load, found = [0] * len(offers), {}
    for key, ranks in holders.items():
        found[key] = min(ranks, key=load.__getitem__)
        piece = offers[found[key]].pieces[key]
        load[found[key]] += prod(piece.shape) * DTYPES[piece.dtype].itemsize
    return found


def _index(
    model: CompiledModel,
    offers: Sequence[_Offer],
    files: Mapping[tuple[str, tuple[int, ...]], str],
    begins: Mapping[str, Mapping[str, int]],
) -> bytes:
    """begins: by file and tensor."""
    offered = {key: piece for offer in offers for key, piece in offer.pieces.items()}
    tensors: dict[str, SavedTensor] = {}
    for key, (dtype, whole, shape) in offered.items():
        name, offsets = key
        piece = Piece(files[key], begins[files[key]][name], offsets, shape)
        before = tensors[name].pieces if name in tensors else ()
        tensors[name] = SavedTensor(dtype, whole, (*before, piece))
    parts = [offer.optimizer for offer in offers if offer.optimizer]
    optimizer = merged(parts) if parts else None
    return index_to_bytes(Index(VERSION, model.num_forwards, tensors, optimizer, offers[0].extra))


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: CompiledModel,
    optimizer: torch.optim.Optimizer | None = None,
) -> Any:
    """Load what save_checkpoint saved, under this plan or another, and return its `extra`. Called
    on all ranks together.

    All or nothing: when it raises, on all ranks, model and optimizer are as they were. Raises
    MeshfoldError where there is no checkpoint or one that is damaged, naming the file; OptionError
    where it is of another model or optimizer, naming what differs.
    """
    _check_bound(model)
    path, state = Path(folder), model.state_dict()
    index = agreed(lambda: _read_index(path, model, optimizer, state))
    _check_names(path, index, gathered(lambda: _names(model, optimizer, state)))
    values, states, options, extra = agreed(lambda: _read(path, model, optimizer, state, index))
    states = localized(model, states)
    model.load_state_dict(values)
    model.num_forwards = index.num_forwards
    if optimizer is not None:
        restore(model, optimizer, states, options)
    return extra


def _read_index(
    path: Path,
    model: CompiledModel,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Tensor],
) -> Index:
    """The index, when it fits the model, and this rank has found its share of the files whole."""
    index, digests = read_index(path)
    for file in sorted(digests)[_rank() :: _num_ranks()]:
        check_file(path / file, digests[file])
    kinds = {
        name: (_kind(NAMES.get(x.dtype), x.shape), _kind(saved.dtype, saved.shape))
        for name, x in state.items()
        for saved in [index.tensors.get(MODEL + name)]
        if saved is not None
    }
    wrong = [
        f"{n} is {now} here and {then} there" for n, (now, then) in kinds.items() if now != then
    ]
    if wrong:
        raise OptionError(f"{path}: {_first(wrong)}; load it into a model like the one saved")
    if optimizer is not None:
        try:
            check_optimizer(model, optimizer, index)
        except MeshfoldError as error:
            raise type(error)(f"{path}: {error}") from error
    return index


def _names(
    model: CompiledModel, optimizer: torch.optim.Optimizer | None, state: Mapping[str, Tensor]
) -> set[str]:
    """What this rank loads: tensors of the model, and parameters that the optimizer has."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]} if optimizer else {}
    trained = {f"the optimizer's {n}" for n, p in model.named_parameters() if id(p) in held}
    return {*state, *trained}


def _check_names(path: Path, index: Index, found: Sequence[set[str]]) -> None:
    here = set().union(*found)
    there = {n.removeprefix(MODEL) for n in index.tensors if n.startswith(MODEL)}
    if index.optimizer and any(name.startswith("the optimizer's ") for name in here):
        there |= {
            f"the optimizer's {n}" for group in index.optimizer.groups for n in group.parameters
        }
    wrong = [f"{name} is missing there" for name in sorted(here - there)]
    wrong += [f"{name} is missing here" for name in sorted(there - here)]
    if wrong:
        raise OptionError(f"{path}: {_first(wrong)}; load it into a model like the one saved")


def _read(
    path: Path,
    model: CompiledModel,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Tensor],
    index: Index,
) -> tuple[dict[str, Tensor], State, list[dict[str, Any]], Any]:
    """All that this rank loads, in memory of its own: tensors of the model, optimizer states,
    options of the optimizer's groups, extra."""

    def read(where: str, like: Tensor | None = None) -> Tensor:
        if where not in index.tensors:
            raise MeshfoldError(f"{path}: the index has no tensor {where}; {REMEDY}")
        saved = index.tensors[where]
        dtype = DTYPES[saved.dtype]
        found = (
            empty_as(like, dtype)
            if like is not None and tuple(like.shape) == saved.shape
            else torch.empty(saved.shape, dtype=dtype)
        )
        offsets, part = part_of(found)
        read_part(path, saved, offsets, part)
        return found

    def value(node: Any, like: Tensor | None = None) -> Any:
        return decoded(node, {where: read(where, like) for where in tensor_names(node)})

    values = {name: read(MODEL + name, x) for name, x in state.items()}
    states: State = {}
    options: list[dict[str, Any]] = []
    if optimizer is not None and index.optimizer is not None:
        for name, _ in model.named_parameters():
            nodes = index.optimizer.state.get(name, {})
            states[name] = {key: value(node, state[name]) for key, node in nodes.items()}
        options = [value(group.options) for group in index.optimizer.groups]
        if not all(isinstance(found, dict) and "params" not in found for found in options):
            raise MeshfoldError(f"{path}: the index holds no options of groups; {REMEDY}")
    return values, states, options, value(index.extra)


def _kind(dtype: str | None, shape: Sequence[int]) -> str:
    return f"{dtype} {list(shape)}"


def _first(wrong: Sequence[str]) -> str:
    """The first few of many."""
    more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
    return ", ".join(wrong[:3]) + more


def _check_bound(model: CompiledModel) -> None:
    if not isinstance(model, CompiledModel):
        raise OptionError(
            f"the model is a {type(model).__name__}, which is not compiled; pass what "
            "meshfold.compile returned"
        )
    if model.rank_mesh is None:
        raise MeshfoldError(
            "this model holds no parameters (closed, or compiled without processes)"
        )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
