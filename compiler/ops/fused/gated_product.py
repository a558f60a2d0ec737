"""The op meshfold::gated_product: act(gate) * x, of gated linear units (Shazeer 2020,
arXiv:2002.05202), which keeps gate and x alone.

As two ops autograd keeps act(gate), too, for the gradient of x. Here backward computes it again,
and no tensor is needed besides the gradients:

    d gate = act'(gate) (g x),   dx = act(gate) g

Importing this defines the op.
"""

from typing import Any

import torch
from torch import Tensor

GATED_PRODUCT = "meshfold.gated_product.default"
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def gated_product(gate: Tensor, x: Tensor, activation: str) -> Tensor:
    """gate and x of one shape and dtype -> the same; activation: one of ACTIVATIONS."""
    return _GatedProduct.apply(gate, x, activation)  # type: ignore[no-any-return, no-untyped-call]


def _activated(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return torch.ops.aten.silu(gate)  # type: ignore[no-any-return]
    return torch.ops.aten.gelu(gate, approximate=_approximation(activation))  # type: ignore[no-any-return]


def _through(gradient: Tensor, gate: Tensor, activation: str) -> Tensor:
    """The gradient of the gate from that of what is activated."""
    if activation == "silu":
        return torch.ops.aten.silu_backward(gradient, gate)  # type: ignore[no-any-return]
    how = _approximation(activation)
    return torch.ops.aten.gelu_backward(gradient, gate, approximate=how)  # type: ignore[no-any-return]


def _approximation(activation: str) -> str:
    return "tanh" if activation == "gelu_tanh" else "none"


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, x: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, x)
        ctx.activation = activation
        return _activated(gate, activation).mul_(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gate, x = ctx.saved_tensors
        of_gate = of_x = None
        if ctx.needs_input_grad[0]:
            of_gate = _through(gradient * x, gate, ctx.activation)
        if ctx.needs_input_grad[1]:
            of_x = _activated(gate, ctx.activation).mul_(gradient)
        return of_gate, of_x, None


torch.library.define("meshfold::gated_product", "(Tensor gate, Tensor x, str activation) -> Tensor")
torch.library.impl("meshfold::gated_product", "CompositeImplicitAutograd", gated_product)
