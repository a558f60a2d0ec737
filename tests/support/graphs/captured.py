"""A small module as capture sees it: its targets, and whether its graph computes the same."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from meshfold.capture.pipeline import Captured, capture
from meshfold.ops.reference_interpreter import run_graph
from meshfold.validation.float64_mode import float64_everywhere


def targets_of(found: Captured) -> list[str]:
    """The ops of a captured module, in order, without namespace and overload."""
    ops = (op for region in found.graph.regions for op in region.graph.ops)
    return [op.target.split(".")[1] for op in ops]


def captured_in_float64(model: nn.Module, inputs: Mapping[str, Tensor]) -> Captured:
    """The capture of a module in float64, held against the module: value and gradients of all
    parameters are the same to 1e-12."""
    model.double()
    with float64_everywhere():
        found = capture(model, inputs)
        parameters = dict(model.named_parameters())
        (made,) = run_graph(
            found.graph, parameters, dict(model.named_buffers()), found.constants, inputs
        ).values()
        right = model(**inputs)
    torch.testing.assert_close(made, right, rtol=1e-12, atol=1e-12)
    pairs = [torch.autograd.grad(y.sum(), list(parameters.values())) for y in (made, right)]
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    return found
