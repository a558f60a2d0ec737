"""Shared layers, then independent ones: the checkpoint of a model whose layers share parameters
becomes one of the model in which every layer has its own (Pseudo-to-Real, arXiv:2110.03888).

    shared     one block, called at every depth: small states, all depths train it
    delink     the block, and its optimizer states, copied for each depth
    released   as many blocks; the first loss is the same, bit for bit, and the training goes on

What becomes a copy of what is read off the two models as they are captured: they run the same ops
on the same values, and differ in the names of what these read of the model.
"""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from meshfold.capture.pipeline import capture
from meshfold.capture.trace.loss_function import LossFunction
from meshfold.checkpoint_files.copies import copied_optimizer, write_copies
from meshfold.checkpoint_files.folder import working_folder
from meshfold.checkpoint_files.index import Index, SavedOptimizer, read_index
from meshfold.checkpoint_files.values import tensor_names
from meshfold.errors import OptionError
from meshfold.ir.op_graph import BufferInfo, FoldedGraph, ParameterInfo
from meshfold.passes.graph.matched_parameters import matched_parameters
from meshfold.training.saving.checkpoint import MODEL

_SAVED = "give the model that was saved as the one with shared layers"


@dataclass(frozen=True)
class Delinked:
    """What delink did. num_shared: parameters of the checkpoint that became several, num_copies:
    what they became; num_states: tensors of optimizer states in the new checkpoint."""

    num_shared: int
    num_copies: int
    num_states: int
    optimizer: str
    """Its kind; empty where it was left out."""


def delink(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    shared: nn.Module,
    model: nn.Module,
    example_inputs: Mapping[str, Any],
    *,
    loss_fn: LossFunction | None = None,
    parameters_only: bool = False,
) -> Delinked:
    """Write to the folder `out` what save_checkpoint wrote for `shared` to the folder `checkpoint`,
    for `model`: the same model with layers of its own where `shared` has one for several depths.

    Parameters, buffers and optimizer states are copied for each use; options of the optimizer, the
    count of forward passes and `extra` are the same. parameters_only: without the optimizer.
    example_inputs, loss_fn: as for compile. Both models may be on the meta device; neither is
    changed. Called on one process.

    Raises OptionError where nothing is shared, where the models differ in more than that, where the
    checkpoint is of another model, or has no optimizer; MeshfoldError where it is damaged, or `out`
    cannot be written. `out` then is as it was.
    """
    graphs = [capture(m, example_inputs, loss_fn=loss_fn).graph for m in (shared, model)]
    return delink_captured(Path(checkpoint), Path(out), *graphs, parameters_only=parameters_only)


def delink_captured(
    checkpoint: Path,
    out: Path,
    shared: FoldedGraph,
    model: FoldedGraph,
    *,
    parameters_only: bool = False,
) -> Delinked:
    """The same of models that were captured."""
    if checkpoint.resolve() in (out.resolve(), working_folder(out).resolve()):
        raise OptionError(
            f"{out}: would be written in {checkpoint}, the checkpoint that is read; write to "
            "another folder"
        )
    sources = _sources(shared, model)
    index, _ = read_index(checkpoint)
    _check_saved(checkpoint, index, shared)
    if index.optimizer is None and not parameters_only:
        raise OptionError(
            f"{checkpoint}: saved without an optimizer, so the training would start its states "
            "anew; save it with one, or ask for parameters only"
        )
    tensors = {
        MODEL + name: MODEL + sources[info.name]
        for info in _stored(model)
        for name in (info.name, *info.aliases)
    }
    tensors |= {name: name for name in tensor_names(index.extra)}
    optimizer: SavedOptimizer | None = None
    num_states = 0
    if index.optimizer is not None and not parameters_only:
        parameters = {info.name: sources[info.name] for info in model.parameters}
        optimizer, states = copied_optimizer(index.optimizer, parameters)
        tensors |= states
        num_states = sum(len(tensor_names(list(of.values()))) for of in optimizer.state.values())
    write_copies(checkpoint, out, tensors, optimizer)
    uses = Counter(sources[info.name] for info in model.parameters)
    copies = [n for n in uses.values() if n > 1]
    return Delinked(len(copies), sum(copies), num_states, optimizer.kind if optimizer else "")


def _sources(shared: FoldedGraph, model: FoldedGraph) -> dict[str, str]:
    """First name of every stored tensor of `model` -> of the one in `shared` that it is a copy of.
    Raises OptionError."""
    found = matched_parameters(shared, model)
    stored = {info.name: info for info in _stored(shared)}
    for info in _stored(model):
        # What no op reads is the same under its own name.
        source = stored.get(found.setdefault(info.name, info.name))
        if source is None or source.shape != info.shape:
            raise OptionError(
                f"{info.name} is read by no op, and the model with shared layers has none like it; "
                "take it out of the model"
            )
    found = {info.name: found[info.name] for info in _stored(model)}
    if left := sorted(stored.keys() - set(found.values())):
        raise OptionError(
            f"{left[0]} of the model with shared layers has no place in the other; give the same "
            "model twice, with its layers shared and not"
        )
    if len({found[info.name] for info in model.parameters}) == len(model.parameters):
        raise OptionError(
            "nothing is shared: every parameter of the one model has one in the other; load the "
            "checkpoint as it is"
        )
    return found


def _stored(graph: FoldedGraph) -> list[ParameterInfo | BufferInfo]:
    """What a checkpoint of the model holds."""
    return [*graph.parameters, *(b for b in graph.buffers if b.persistent)]


def _check_saved(path: Path, index: Index, shared: FoldedGraph) -> None:
    """Raises OptionError where the checkpoint is of another model."""
    wanted = {MODEL + n: info for info in _stored(shared) for n in (info.name, *info.aliases)}
    there = {name for name in index.tensors if name.startswith(MODEL)}
    for name in sorted(wanted.keys() ^ there):
        missing = "there" if name in wanted else "in the model"
        raise OptionError(f"{path}: {name.removeprefix(MODEL)} is missing {missing}; {_SAVED}")
    for name, info in wanted.items():
        saved = index.tensors[name]
        if saved.shape != info.shape:
            raise OptionError(
                f"{path}: {name.removeprefix(MODEL)} is {list(saved.shape)} there, and "
                f"{list(info.shape)} in the model; {_SAVED}"
            )
