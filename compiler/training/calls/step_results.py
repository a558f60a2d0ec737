"""What a step returns: its outputs in the structure that the model returns them in."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshfold.capture.trace.returned import NOTHING
from meshfold.capture.trace.structures import Leaf, filled_structure
from meshfold.codegen.emit.pipeline import EmittedPipeline
from meshfold.errors import OptionError
from meshfold.ir.op_graph import OutputInfo
from meshfold.ir.spmd import Layout
from meshfold.training.calls.batch_sizes import ProgramForm
from meshfold.training.shards.state_dict import StateExchange


def step_result(form: ProgramForm, outputs: Sequence[Tensor], states: StateExchange) -> Any:
    """`outputs`, those of the program of `form`, as the model returns them: a lone loss where none
    was asked for. Outputs that stay on their ranks become DTensors."""
    folded = form.captured.graph
    found = dict(zip((info.name for info in folded.outputs), outputs, strict=True))
    if folded.returns.sharded:
        for info, emitted in zip(folded.apart, _emitted(form), strict=True):
            if info.shape:
                layout = _layout(form, emitted)
                found[info.name] = states.as_dtensor(found[info.name], info.shape, layout)
    structure = form.captured.structure
    if structure == NOTHING:
        structure = Leaf(folded.outputs[0].name)
    return filled_structure(structure, found)


def _emitted(form: ProgramForm) -> tuple[OutputInfo, ...]:
    """The outputs that are set apart, as the program that makes them numbers its instances."""
    program = form.program
    return (program.stages[-1] if isinstance(program, EmittedPipeline) else program).folded.apart


def _layout(form: ProgramForm, info: OutputInfo) -> Layout:
    """The layout that an output leaves in."""
    program = form.program
    last = program.stages[-1] if isinstance(program, EmittedPipeline) else program
    return last.region_of(info.source.instance).outputs[info.source.output]


def check_loss(output: OutputInfo) -> None:
    """Raises OptionError where the first output of a program is no loss."""
    if output.shape:
        raise OptionError(
            f"the model returns a tensor of shape {list(output.shape)}, and a step needs a "
            "loss of no dims; pass labels, or wrap the model so that it returns its loss"
        )


def check_gradient(loss: Tensor) -> None:
    """Raises OptionError where a backward of `loss` reaches no parameter."""
    if loss.requires_grad:
        return
    if torch.is_inference_mode_enabled():
        raise OptionError(
            "train_step under torch.inference_mode(), which keeps no gradients; call it outside, "
            "or call the model itself to evaluate"
        )
    raise OptionError(
        "nothing that the loss depends on requires a gradient: every parameter is frozen; set "
        "requires_grad of those that are trained, or call the model under torch.no_grad()"
    )
