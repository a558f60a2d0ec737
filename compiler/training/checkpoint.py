"""Checkpoints of a CompiledModel and its optimizer, by torch.distributed.checkpoint.

    save   every rank writes its shards to FOLDER.partial; when all is there, FOLDER -> FOLDER.old,
           FOLDER.partial -> FOLDER, and FOLDER.old is deleted
    load   into any plan of the model: other mesh, other stages, other number of processes

A rename is done or not done, so whenever a save dies the last good checkpoint is FOLDER, or between
the two renames FOLDER.old, which load and the next save take for it.
"""

import io
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from meshfold.errors import MeshfoldError, OptionError
from meshfold.training.compiled_model import CompiledModel

MODEL, STATE = "model.", "optimizer.state."
GROUPS = "optimizer.group_options"
"""What an optimizer has for each of its groups of parameters (lr and the like), as the bytes of
torch.save: torch.distributed.checkpoint takes lists and dicts apart, and would pickle a class of
ours by the name of its module."""
PICKLED_GROUPS = "optimizer.param_groups"
"""The same in a checkpoint of version 0.1, as a pickled class: refused."""
NUM_STEPS = "num_steps"


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: CompiledModel,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Save parameters, buffers, optimizer states and the count of steps that dropout draws from.
    Called on all ranks together; they share the folder's file system. What was in `folder` is
    replaced when everything is written, not before."""
    path = Path(folder)
    partial, old = _beside(path, "partial"), _beside(path, "old")
    state: dict[str, Any] = {MODEL + name: x for name, x in model.state_dict().items()}
    state[NUM_STEPS] = model.num_steps
    if optimizer is not None:
        state |= _optimizer_state(model, optimizer)
    if _is_first():
        if old.exists() and not path.exists():
            old.rename(path)
        for left in (partial, old):
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
    _wait_for_all()
    with _alone_or_together() as alone:
        save(state, checkpoint_id=partial, no_dist=alone)
    _wait_for_all()
    if _is_first():
        if path.exists():
            path.rename(old)
        partial.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    _wait_for_all()


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: CompiledModel,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Load what save_checkpoint saved, under this plan or another. Called on all ranks together.

    Raises MeshfoldError where there is no checkpoint, OptionError where it has no optimizer, or one
    with other groups of parameters.
    """
    path = Path(folder)
    if not path.exists() and _beside(path, "old").exists():
        path = _beside(path, "old")
    if not (path / ".metadata").exists():
        raise MeshfoldError(f"{folder}: no checkpoint there; save_checkpoint writes one")
    reader = FileSystemReader(path)
    saved = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {MODEL + name: x for name, x in model.state_dict().items()}
    state[NUM_STEPS] = 0
    if optimizer is not None:
        if PICKLED_GROUPS in saved:
            raise OptionError(
                f"{folder}: the optimizer was saved by an older version; load the model alone"
            )
        if GROUPS not in saved:
            raise OptionError(f"{folder}: saved without an optimizer; load the model alone")
        state[GROUPS] = b""
        state |= dict(_room(model, optimizer, saved))
    with _alone_or_together() as alone:
        load(state, storage_reader=reader, no_dist=alone)
    model.load_state_dict(
        {n.removeprefix(MODEL): x for n, x in state.items() if n.startswith(MODEL)}
    )
    model.num_steps = state[NUM_STEPS]
    if optimizer is not None:
        _restore(folder, model, optimizer, state)


def _optimizer_state(model: CompiledModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is like its parameter is saved as the parameter is, by name."""
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    written = io.BytesIO()
    torch.save(options, written)
    state: dict[str, Any] = {GROUPS: written.getvalue()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            is_like = isinstance(value, Tensor) and value.shape == parameter.shape
            entry = model.saved_form(name, value) if is_like else value
            state[f"{STATE}{name}.{key}"] = entry
    return state


def _room(
    model: CompiledModel, optimizer: torch.optim.Optimizer, saved: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Tensors to load the states of this rank's parameters into."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if id(parameter) not in held:
            continue
        shape = model.global_shape(name)
        for key in (k for k in saved if k.startswith(f"{STATE}{name}.")):
            found = saved[key]
            if not isinstance(found, TensorStorageMetadata):
                yield key, None
                continue
            dtype = found.properties.dtype
            if tuple(found.size) == shape:
                yield key, model.saved_form(name, torch.empty_like(parameter, dtype=dtype))
            else:
                yield key, torch.empty(found.size, dtype=dtype)


def _restore(
    folder: str | os.PathLike[str],
    model: CompiledModel,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
) -> None:
    groups = torch.load(io.BytesIO(state[GROUPS]), weights_only=False)
    if len(groups) != len(optimizer.param_groups):
        raise OptionError(
            f"{folder}: the optimizer was saved with {len(groups)} groups of parameters, this one "
            f"has {len(optimizer.param_groups)}; make it alike"
        )
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        group.update(options)
    for name, parameter in model.named_parameters():
        prefix = f"{STATE}{name}."
        found = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        shape = model.global_shape(name)
        for key, value in found.items():
            is_like = isinstance(value, Tensor) and tuple(value.shape) == shape
            local = model.local_form(name, value) if is_like else value
            optimizer.state[parameter][key] = local


@contextmanager
def _alone_or_together() -> Iterator[bool]:
    """Whether this is the only process; torch's warning about that is silenced."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield not dist.is_initialized()


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}.{suffix}")


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()
