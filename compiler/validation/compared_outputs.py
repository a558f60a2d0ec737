"""The outputs of a step, besides its loss, against those of the model in one process."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshfold.capture.pipeline import Captured
from meshfold.capture.trace.loss_function import call_model
from meshfold.capture.trace.returned import name_outputs, named_total
from meshfold.capture.trace.structures import filled_structure
from meshfold.models.from_argument import BuiltModel
from meshfold.training.compiled_model import CompiledModel
from meshfold.validation.float64_mode import in_float64
from meshfold.validation.report import Sizes


def output_sizes(built: BuiltModel, captured: Captured, compiled: CompiledModel) -> Sizes:
    """Sizes of every output but the loss, and of its difference from this rank's: shards are
    gathered first. Nothing where a step returns its loss alone. Gradients are left as they were,
    none: called before the first step."""
    folded = captured.graph
    if not folded.apart:
        return {}
    with torch.no_grad():
        returned = call_model(built.model, built.example_inputs, built.loss_fn)
    loss = folded.outputs[0].name
    found = {**name_outputs(returned), loss: named_total(loss, returned)}
    wanted = {output.name: found[output.name] for output in folded.outputs}
    right = name_outputs(filled_structure(captured.structure, wanted))
    if compiled.plan.schedule:
        mine = name_outputs(compiled.train_step(built.example_inputs))
        compiled.zero_grad()
    else:
        mine = name_outputs(compiled(**built.example_inputs))
    compiled.num_forwards = 0
    return {
        name or "the output": (_largest(x), _largest(_whole(mine[name]) - _wide(x)))
        for name, x in right.items()
        if name != loss_path(captured)
    }


def loss_in(captured: Captured, returned: Any) -> Tensor:
    """The loss in what a step of a captured model returned."""
    return name_outputs(returned)[loss_path(captured)]


def loss_path(captured: Captured) -> str:
    """Where the loss is in what a step returns."""
    marked = {captured.graph.outputs[0].name: torch.zeros(())}
    (path,) = name_outputs(filled_structure(captured.structure, marked))
    return path


def wide_loss(loss_fn: Any) -> Any:
    """A loss function in float64."""
    return in_float64(copy.deepcopy(loss_fn)) if isinstance(loss_fn, nn.Module) else loss_fn


def _whole(x: Tensor) -> Tensor:
    return _wide(x.full_tensor() if isinstance(x, DTensor) else x)


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.complex128 if x.is_complex() else torch.float64)


def _largest(x: Tensor) -> float:
    return float(_wide(x).abs().max()) if x.numel() else 0.0
