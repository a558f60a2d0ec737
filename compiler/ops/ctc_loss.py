"""Losses of connectionist temporal classification (Graves et al. 2006), one per sequence.

    ctc_loss(log_probs[t, n, c], targets[n, s], input_lengths[n], target_lengths[n]) -> [n]

targets are padded. The op of torch has results whose shapes depend on the lengths; this one has
none, and its backward runs the forward again.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CTC_LOSS = "meshfold.ctc_loss.default"

_SCHEMA = (
    "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, "
    "bool zero_infinity"
)


def _losses(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    lengths = input_lengths.long(), target_lengths.long()
    # cuDNN's has other limits and another gradient where a loss is infinite.
    with torch.backends.cudnn.flags(enabled=False):
        return F.ctc_loss(
            log_probs, targets, *lengths, blank, reduction="none", zero_infinity=zero_infinity
        )


def _fake_losses(log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1:2])


def _gradients(gradient: Tensor, log_probs: Tensor, *others: Any) -> Tensor:
    with torch.enable_grad():
        leaf = log_probs.detach().requires_grad_()
        (found,) = torch.autograd.grad(_losses(leaf, *others), leaf, gradient)
    return found


def _fake_gradients(gradient: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, blank, zero_infinity = inputs
    ctx.save_for_backward(*tensors)
    ctx.others = blank, zero_infinity


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.meshfold.ctc_loss_backward(gradient, *ctx.saved_tensors, *ctx.others)
    return found, None, None, None, None, None


torch.library.define("meshfold::ctc_loss", f"({_SCHEMA}) -> Tensor")
torch.library.impl("meshfold::ctc_loss", "CompositeExplicitAutograd", _losses)
torch.library.register_fake("meshfold::ctc_loss", _fake_losses)
torch.library.register_autograd("meshfold::ctc_loss", _backward, setup_context=_keep)
torch.library.define("meshfold::ctc_loss_backward", f"(Tensor gradient, {_SCHEMA}) -> Tensor")
torch.library.impl("meshfold::ctc_loss_backward", "CompositeExplicitAutograd", _gradients)
torch.library.register_fake("meshfold::ctc_loss_backward", _fake_gradients)


def ctc_losses(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """Put the op into a graph that is being traced."""
    losses: Tensor = torch.ops.meshfold.ctc_loss(
        log_probs, targets, input_lengths, target_lengths, blank, zero_infinity
    )
    return losses
