"""Outputs of a batch, from those of its microbatches: the loss is a sum, others are put together.

    Shard(d)     every microbatch has its samples along d: one after the other
    Partial      a summand of each: the sum, as of the loss
    Invariant    the same in every microbatch: any

Where microbatches are slices of a rank's own slice of the batch, the samples of microbatch j of all
ranks, gathered, are those of slice after slice; they are put in the order of the batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshfold.ir.spmd import PARTIAL, SpmdType


class MicrobatchOutputs:
    """What comes out of the last stage. types: of every output but the loss, on the free axis of
    microbatches. num_slices: slices of the batch that microbatches are slices of; 1 where they are
    slices of the whole batch."""

    def __init__(self, types: Sequence[SpmdType], num_slices: int) -> None:
        self.types = types
        self.num_slices = num_slices
        self._found: list[dict[int, Tensor]] = [{} for _ in types]

    def add(self, microbatch: int, outputs: Sequence[Tensor]) -> None:
        """The outputs of one microbatch, the loss left out."""
        for kept, t, x in zip(self._found, self.types, outputs, strict=True):
            x = x.detach()
            if t == PARTIAL and kept:
                x = kept.popitem()[1] + x
            kept[microbatch if t.is_shard else 0] = x

    def whole(self) -> list[Tensor]:
        """The outputs of the batch, on the devices that have the last stage."""
        return [
            self._joined([kept[j] for j in sorted(kept)], t.dim) if t.is_shard else kept[0]
            for kept, t in zip(self._found, self.types, strict=True)
        ]

    def _joined(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        if self.num_slices == 1:
            return torch.cat([*parts], dim)
        shapes = [(*x.shape[:dim], self.num_slices, -1, *x.shape[dim + 1 :]) for x in parts]
        split = [x.reshape(shape) for x, shape in zip(parts, shapes, strict=True)]
        return torch.cat(split, dim + 1).flatten(dim, dim + 1)
