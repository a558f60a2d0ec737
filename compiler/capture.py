"""Capture: an unmodified model and example inputs become a folded op graph.

    model --fake_twin--> twin --export_twin--> exported --read_program--> program
          --number--> flat graph --fold--> folded graph

Forward only; no weights are needed or allocated, so the model may be on the meta device. The first
layer of the compiler that runs the user's code, and the last.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshfold.capture_export import export_twin
from meshfold.capture_lower import read_program
from meshfold.capture_program import number
from meshfold.capture_twin import fake_twin, flatten_inputs, model_names
from meshfold.opgraph import FoldedGraph
from meshfold.passes.fold import fold


@dataclass(frozen=True)
class Captured:
    """graph: the folded program; with a loss, only what the loss needs.
    constants: values of CONSTANT sources by name, small CPU tensors.
    model_outputs: path of every tensor the model returned, those that were dropped too."""

    graph: FoldedGraph
    constants: Mapping[str, torch.Tensor]
    model_outputs: tuple[str, ...]


def capture(
    model: nn.Module, example_inputs: Mapping[str, Any], *, full_capture: bool = False
) -> Captured:
    """Capture `model(**example_inputs)`.

    example_inputs are keyword arguments; tensors, nested in dicts, lists and tuples too, become
    inputs (only their shapes and dtypes are read), anything else a constant of the capture.
    full_capture traces every layer, where otherwise layers proven equal are traced once.
    The model is used as it is: train or eval mode, dtype, ties. It is not changed.

    Raises CaptureError, naming op and source line, if the model cannot be captured, and
    OptionError if example_inputs holds no tensor.
    """
    names = model_names(model)
    twin = fake_twin(model)
    inputs = flatten_inputs(example_inputs, twin.mode)
    exported = export_twin(twin, inputs)
    program = read_program(exported, names, inputs.infos)
    flat = number(program, names, inputs.infos, twin.notes)
    return Captured(fold(flat.graph, flat.stacks), dict(program.constants), exported.model_outputs)
