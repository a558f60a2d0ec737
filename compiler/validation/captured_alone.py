"""Is the captured program the model? Both on one process, before a plan is blamed.

Whatever a capture gets wrong, every plan computes alike, and no op of the emitted programs differs
from the captured graph.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meshfold.ir.op_graph import FoldedGraph
from meshfold.ops.reference_interpreter import Watch, run_graph
from meshfold.torch_compat.pytree import named_leaves

Tensors = Mapping[str, Tensor]


def captured_step(
    folded: FoldedGraph,
    constants: Tensors,
    parameters: Tensors,
    buffers: Tensors,
    batch: Mapping[str, Any],
    watch: Watch | None = None,
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss of the captured graph in one process, and the gradient of every parameter. watch: see
    run_graph."""
    leaves = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in parameters.items()}
    # Frozen parameters that forward writes are buffers of the graph.
    held = {**parameters, **buffers}
    copies = {info.name: held[info.name].detach().clone() for info in folded.buffers}
    inputs = {n: x for n, x in named_leaves(dict(batch)) if isinstance(x, Tensor)}
    loss = run_graph(folded, leaves, copies, constants, inputs, watch)[folded.outputs[0].name]
    torch.autograd.backward(loss.sum())
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def capture_difference(
    captured: tuple[Tensor, Mapping[str, Tensor | None]],
    model: tuple[Tensor, Mapping[str, Tensor | None]],
    tolerance: float,
) -> str:
    """One clause that says how the captured step differs from the model's, "" if it does not."""
    says = "the captured program differs from the model on one process"
    (loss, gradients), (right, right_gradients) = captured, model
    if not _size(loss - right) <= tolerance * max(1.0, _size(right)):
        return f"{says}: the losses are {loss.sum().item()!r} and {right.sum().item()!r}"
    largest = max((_size(g) for g in right_gradients.values() if g is not None), default=0.0)
    for name, mine in gradients.items():
        theirs = right_gradients[name]
        if mine is None and theirs is None:
            continue
        zero = torch.zeros((), dtype=right.dtype)
        difference = _size((zero if mine is None else mine) - (zero if theirs is None else theirs))
        # What is zero but for rounding is not compared with itself.
        scale = max(0.0 if theirs is None else _size(theirs), 1e-3 * largest)
        if not difference <= tolerance * scale:
            by = difference / scale if scale else difference
            return f"{says}: the gradient of {name} by {by:.1e}"
    return ""


def _size(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0
