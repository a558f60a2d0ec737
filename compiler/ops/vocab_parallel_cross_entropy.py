"""Cross entropy over classes of which every rank has a shard."""

from typing import Any

import torch
from torch import Tensor

from meshfold.distributed.rank_mesh import RankMesh, all_reduced
from meshfold.ops.distributed_index import check_indices
from meshfold.sharding.indices import ShardDigits, shard_indices_of
from meshfold.sharding.layout import filled
from meshfold.sharding.slicing import local_indices, locate_indices


def sharded_cross_entropy(
    mesh: RankMesh,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    num_classes: int,
    digits: ShardDigits,
) -> Tensor:
    """Losses of rows: logits [rows, own classes, ...], target [rows, ...], weight [classes],
    unsharded. digits: of the axes that shard the classes, which may be padded."""
    losses: Tensor = _ShardedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        mesh, logits, target, weight, ignore_index, label_smoothing, num_classes, digits
    )
    return losses


class _ShardedCrossEntropy(torch.autograd.Function):
    """Cross entropy over shards of classes. With m, z the maximum and the sum of exp(x - m) over
    all V classes, w the weights of classes, W their sum, t the target, e the smoothing, a loss is

        (1 - e) w[t] (m + log z - x[t])  +  e / V (W (m + log z) - sum_c w[c] x[c])

    and its gradient is

        ((1 - e) w[t] + e W / V) exp(x - m) / z  -  (1 - e) w[t] [class is t]  -  e w / V

    Backward needs no communication. What is beyond the end of padded classes is not looked at and
    gets zeros.
    """

    @staticmethod
    def forward(
        ctx: Any,
        mesh: RankMesh,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        smoothing: float,
        num_classes: int,
        digits: ShardDigits,
    ) -> Tensor:
        axes = tuple(axis for axis, *_ in digits)
        indices = shard_indices_of(mesh, digits)
        own = local_indices(num_classes, indices, logits.device)
        own = own[own < num_classes]
        x = logits[:, : own.numel()]
        x = x if x.dtype.itemsize >= 4 else x.float()
        largest = all_reduced(mesh, x.amax(1), axes, "max")
        # An ignored target may be any number: it is given class 0 and masked out.
        counts = target != ignore_index
        target = torch.where(counts, target, 0)
        check_indices(target, num_classes, "class")
        is_local, column = locate_indices(target, num_classes, indices)
        column = column.clamp_max(own.numel() - 1)
        picked = x.gather(1, column.unsqueeze(1)).squeeze(1).masked_fill(~is_local, 0.0)
        sums_of_ranks = [(x - largest.unsqueeze(1)).exp_().sum(1), picked]
        shares = torch.ones_like(own, dtype=x.dtype) if weight is None else weight[own].to(x.dtype)
        shares = shares.view(-1, *(1,) * (x.dim() - 2))
        if smoothing:
            sums_of_ranks.append((x * shares).sum(1))
        sums = all_reduced(mesh, torch.stack(sums_of_ranks), axes)
        normalizer = largest + sums[0].log()
        factor = (1.0 - smoothing) * counts.to(x.dtype)
        total: float | Tensor = float(num_classes)
        if weight is not None:
            factor = factor * weight[target].to(x.dtype)
            total = weight.sum().to(x.dtype)
        losses = factor * (normalizer - sums[1])
        if smoothing:
            spread = smoothing / num_classes * (total * normalizer - sums[2])
            losses = losses + spread.masked_fill(~counts, 0.0)
        ctx.save_for_backward(logits, normalizer, counts, is_local, column, factor, shares)
        ctx.evenly = smoothing / num_classes, total
        return losses.masked_fill(~counts, 0.0).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        logits, normalizer, counts, is_local, column, factor, shares = ctx.saved_tensors
        each, total = ctx.evenly
        x = logits[:, : shares.shape[0]].to(normalizer.dtype)
        result = (x - normalizer.unsqueeze(1)).exp_()
        gradient = gradient * counts
        result *= ((factor + each * total) * gradient).unsqueeze(1)
        result.scatter_add_(1, column.unsqueeze(1), (-factor * is_local * gradient).unsqueeze(1))
        if each:
            result -= each * shares * gradient.unsqueeze(1)
        result = filled(result.to(logits.dtype), logits.shape)
        return None, result, None, None, None, None, None, None
