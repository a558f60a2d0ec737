"""The adaptive softmax of torch, whose clusters take the rows of a batch that they have.

How many these are depends on values. Here every cluster is computed for all rows, and a row takes
what its own cluster says: the same loss and gradients, for the work of a whole softmax.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


def with_whole_clusters(fake: nn.Module) -> tuple[str, ...]:
    """Gives adaptive softmaxes of `fake` a forward of fixed shapes; returns a note of it."""
    found = [m for m in fake.modules() if type(m) is nn.AdaptiveLogSoftmaxWithLoss]
    for module in found:
        module.__class__ = _OfEveryRow
    name = nn.AdaptiveLogSoftmaxWithLoss.__name__
    note = f"{name}: every cluster is computed for all rows, as a whole softmax would be"
    return (note,) if found else ()


class _Result(NamedTuple):
    """As torch has it for itself."""

    output: Tensor
    loss: Tensor


class _OfEveryRow(nn.AdaptiveLogSoftmaxWithLoss):
    def forward(self, input_: Tensor, target_: Tensor) -> Any:
        """As of torch: input [n, d] or [d], target [n] or []."""
        is_batched = target_.dim() > 0
        rows, target = (input_, target_) if is_batched else (input_[None], target_[None])
        # What is no class at all is no place of the head either: its gather raises.
        place, own = target, rows.new_zeros(target.shape)
        for number, (low, high) in enumerate(pairwise(self.cutoffs)):
            is_inside = (target >= low) & (target < high)
            cluster = functional.log_softmax(self.tail[number](rows), dim=1)
            inside = (target - low).clamp(0, high - low - 1)
            found = cluster.gather(1, inside.unsqueeze(1)).squeeze(1)
            own = own + torch.where(is_inside, found, 0.0)
            place = torch.where(is_inside, self.shortlist_size + number, place)
        head = functional.log_softmax(self.head(rows), dim=1)
        output = own + head.gather(1, place.unsqueeze(1)).squeeze(1)
        return _Result(output if is_batched else output.squeeze(0), (-output).mean())
