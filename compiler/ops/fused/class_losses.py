"""What a cross entropy over shards of the classes does, however it comes by its logits.

With m, z the maximum and the sum of exp(x - m) over all V classes, w the weights of classes, W
their sum, t the target, e the smoothing, a loss is

    (1 - e) w[t] (m + log z - x[t])  +  e / V (W (m + log z) - sum_c w[c] x[c])

The ranks' own maxima are all-reduced, then the sums.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshfold.distributed.rank_mesh import RankMesh, all_reduced
from meshfold.sharding.indices import ShardDigits, shard_indices_of
from meshfold.sharding.slicing import check_indices, local_indices, locate_indices


@dataclass(frozen=True, eq=False)
class Targets:
    """Targets of rows, and where they are among the classes of a rank, which are `own`. counts:
    those that are not ignored; is_local, column: whether a target is of this rank, and where."""

    own: Tensor
    counts: Tensor
    target: Tensor
    is_local: Tensor
    column: Tensor

    @classmethod
    def of(
        cls,
        mesh: RankMesh | None,
        target: Tensor,
        ignore_index: int,
        num_classes: int,
        digits: ShardDigits,
    ) -> "Targets":
        """mesh: None where a rank has all classes. Raises IndexError for a target that is none."""
        indices = () if mesh is None else shard_indices_of(mesh, digits)
        own = local_indices(num_classes, indices, target.device)
        own = own[own < num_classes] if indices else own
        # An ignored target may be any number: it is given class 0 and masked out.
        counts = target != ignore_index
        target = torch.where(counts, target, 0)
        check_indices(target, num_classes, "class")
        is_local, column = locate_indices(target, num_classes, indices)
        return cls(own, counts, target, is_local, column.clamp_max(own.numel() - 1))

    def shares(self, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Weights of the rank's classes."""
        if weight is None:
            return torch.ones_like(self.own, dtype=dtype)
        return weight[self.own].to(dtype)


@dataclass(frozen=True, eq=False)
class ClassLosses:
    """Losses of rows, with what their gradients need: normalizer, m + log z; factor, (1 - e) w[t]
    of rows that count; total, W."""

    losses: Tensor
    normalizer: Tensor
    factor: Tensor
    total: float | Tensor


def losses_of_sums(
    mesh: RankMesh | None,
    digits: ShardDigits,
    of: Targets,
    largest: Tensor,
    sums: Tensor,
    weight: Tensor | None,
    smoothing: float,
    num_classes: int,
) -> ClassLosses:
    """largest, sums: per row, over the rank's classes: the maximum; sums of exp(x - largest), of
    x[t], and, with smoothing, of w[c] x[c]."""
    sums[1].masked_fill_(~of.is_local, 0.0)
    if mesh is not None:
        axes = tuple(axis for axis, *_ in digits)
        of_all = all_reduced(mesh, largest, axes, "max")
        sums[0] *= (largest - of_all).exp_()
        largest, sums = of_all, all_reduced(mesh, sums, axes)
    normalizer = largest + sums[0].log()
    factor = (1.0 - smoothing) * of.counts.to(normalizer.dtype)
    total: float | Tensor = float(num_classes)
    if weight is not None:
        factor = factor * weight[of.target].to(normalizer.dtype)
        total = weight.sum().to(normalizer.dtype)
    losses = factor * (normalizer - sums[1])
    if smoothing:
        spread = smoothing / num_classes * (total * normalizer - sums[2])
        losses = losses + spread.masked_fill(~of.counts, 0.0)
    return ClassLosses(losses.masked_fill(~of.counts, 0.0), normalizer, factor, total)
