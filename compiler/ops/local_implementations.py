"""Local implementations for rules whose op is not simply the same op on smaller tensors.

Each takes the StepContext first and names axes by their symbolic names. A sharded dim is described
by its digits: ((axis, blocks), ...), blocks as in the type Shard(dim, blocks) of that axis on the
whole tensor. One function serves every combination of axes: with two axes that ask for something
special, each appears in the arguments (cross_entropy with classes on one, rows on the other).

LOCAL_OPS is keyed by AxisRule.local; meshfold.codegen.emit.op fills in the arguments.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshfold.distributed.rank_mesh import Axes, RankMesh, all_reduced
from meshfold.distributed.step_context import StepContext
from meshfold.ops import vocab_parallel_cross_entropy as classes
from meshfold.ops.batch_norm import batch_norm
from meshfold.ops.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from meshfold.ops.counter_rng import keep_mask, stream_key
from meshfold.ops.distributed_cumsum import cumsum
from meshfold.ops.distributed_index import put_rows, take_rows
from meshfold.ops.draws import BatchSlice, index_summands, local_draw, num_elements
from meshfold.ops.embedding_bag import local_bags
from meshfold.ops.expert_dispatch import combine, dispatch
from meshfold.ops.fused.linear_cross_entropy import linear_class_losses
from meshfold.sharding.indices import ShardDigits, key_heads_of, shard_indices_of
from meshfold.sharding.slicing import (
    check_indices,
    cropped_blocks,
    local_indices,
    local_row,
    locate_indices,
    num_valid_rows,
)

MASK_PARTS = 8
"""In which the mask of a dropout is made."""


def divide_by_ranks(context: StepContext, x: Tensor, axes: Axes) -> Tensor:
    """A mean over the local shard of a dim -> this rank's summand of the mean over the unsharded
    dim, when `axes` shard it evenly."""
    return x / context.mesh.size(axes)


def reshape(context: StepContext, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """x in the local `shape`: a squeeze must not take a dim whose local shard has size 1."""
    return x.reshape(shape)


def valid_rows(context: StepContext, x: Tensor, dim: int, size: int, digits: ShardDigits) -> Tensor:
    """x without the padding rows of a dim, of `size` on the unsharded tensor: they must not get a
    gradient of a product that sums over them. x itself where a rank has no padding rows."""
    blocks = digits[0][1]
    rows = blocks * num_valid_rows(size, shard_indices_of(context.mesh, digits))
    return cropped_blocks(x, dim, blocks, rows)


def embedding(
    context: StepContext,
    weight: Tensor,
    ids: Tensor,
    padding_idx: int,
    num_rows: int,
    digits: ShardDigits,
) -> Tensor:
    """Rows of a table [num_rows, o] of which this rank has a shard: zero where the row is not
    local. ids [...] -> [..., o], to be summed over the axes of `digits`. padding_idx: a global row
    that gets no gradient, -1 for none."""
    indices = shard_indices_of(context.mesh, digits)
    check_indices(ids, num_rows, "embedding index")
    is_local, rows = locate_indices(ids, num_rows, indices)
    skip = local_row(padding_idx, num_rows, indices) if padding_idx >= 0 else None
    found = functional.embedding(rows, weight, padding_idx=skip)
    return found.masked_fill(~is_local.unsqueeze(-1), 0.0)


def local_experts(
    context: StepContext, ids: Tensor, num_experts: int, num_local: int, digits: ShardDigits
) -> Tensor:
    """The numbers that experts ids [t] have among the `num_local` of this rank; num_local for
    those of others, whose rows meshfold.ops.expert_linear.expert_linear makes zero: its result is
    to be summed over the axes of `digits`."""
    is_local, experts = locate_indices(ids, num_experts, shard_indices_of(context.mesh, digits))
    return torch.where(is_local, experts, num_local)


def cross_entropy(
    context: StepContext,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    num_classes: int,
    class_digits: ShardDigits,
    row_axes: Axes,
    is_wide: bool = False,
) -> Tensor:
    """Cross entropy of logits [rows, v, ...], target [rows, ...] and unsharded weights of classes
    [v]. is_wide: the loss is in float32 at least, else in the dtype of the logits.

    class_digits: axes that shard v; the result is the same on them. row_axes: axes that shard rows;
    the result is a pending sum over them. reduction: "mean" (over the targets of all ranks that are
    not ignored, by their weights), "sum" or "none".
    """
    if class_digits or is_wide:
        mesh = context.mesh if class_digits else None
        losses = classes.class_losses(
            mesh,
            logits,
            target,
            weight,
            ignore_index,
            label_smoothing,
            num_classes,
            class_digits,
        )
        losses = losses if is_wide else losses.to(logits.dtype)
    else:
        losses = functional.cross_entropy(
            logits,
            target,
            weight,
            reduction="none" if reduction == "none" else "sum",
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )
    return _reduced(context.mesh, losses, target, weight, reduction, ignore_index, row_axes)


def linear_cross_entropy(
    context: StepContext,
    x: Tensor,
    matrix: Tensor,
    target: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    is_wide: bool,
    num_classes: int,
    class_digits: ShardDigits,
    row_axes: Axes,
) -> Tensor:
    """The same of logits x [rows, k] matrix [v, k]^T + bias [v], which are never whole. is_wide:
    the loss is in float32 at least, else in the dtype of x."""
    losses = linear_class_losses(
        context.mesh if class_digits else None,
        x,
        matrix,
        bias,
        target,
        weight,
        ignore_index,
        label_smoothing,
        num_classes,
        class_digits,
    )
    losses = losses if is_wide else losses.to(x.dtype)
    return _reduced(context.mesh, losses, target, weight, reduction, ignore_index, row_axes)


def nll_loss(
    context: StepContext,
    logarithms: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    row_axes: Axes,
) -> Tensor:
    """Mean over the targets of all ranks of negative log likelihoods, as cross_entropy takes it;
    classes are unsharded."""
    total = functional.nll_loss(
        logarithms, target, weight, reduction="sum", ignore_index=ignore_index
    )
    return _reduced(context.mesh, total, target, weight, "mean", ignore_index, row_axes)


def _reduced(
    mesh: RankMesh,
    losses: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    row_axes: Axes,
) -> Tensor:
    """The losses of rows, or their sum [], as `reduction` wants them: see cross_entropy."""
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    counts = classes.target_count(target, weight, ignore_index, total.dtype)
    return total / all_reduced(mesh, counts, row_axes)


def targets_of_step(context: StepContext, instance: int, op: int) -> float:
    """How many targets of all microbatches a loss of the whole program does not ignore; the sum of
    their weights where classes have some."""
    return context.targets[instance, op]


def dropout(
    context: StepContext,
    x: Tensor,
    probability: float,
    site: tuple[int, int],
    shape: tuple[int, ...],
    digits: tuple[ShardDigits, ...],
    batch_slice: BatchSlice,
) -> Tensor:
    """x with elements dropped with `probability`, the others scaled up to keep the mean.

    site: (instance, op), so that no two ops of a step share a mask. shape: of the tensor on all
    ranks together; digits: per dim. batch_slice: (dim, blocks, number of microbatches), the slices
    of the batch of which this is one."""
    return _scaled(
        x, dropout_mask(context, probability, site, shape, digits, batch_slice), probability
    )


def native_dropout(
    context: StepContext,
    x: Tensor,
    probability: float,
    site: tuple[int, int],
    shape: tuple[int, ...],
    digits: tuple[ShardDigits, ...],
    batch_slice: BatchSlice,
) -> tuple[Tensor, Tensor]:
    """The same, and the mask of the elements that are not dropped."""
    mask = dropout_mask(context, probability, site, shape, digits, batch_slice)
    return _scaled(x, mask, probability), mask


def dropout_mask(
    context: StepContext,
    probability: float,
    site: tuple[int, int],
    shape: tuple[int, ...],
    digits: tuple[ShardDigits, ...],
    batch_slice: BatchSlice,
) -> Tensor:
    """This rank's shard, in this microbatch, of the mask of elements that are not dropped. It is
    made part by part: numbers are hashed in several int64 per element of one byte."""
    summands = index_summands(context, shape, digits, batch_slice)
    sizes = [summand.numel() for summand in summands]
    mask = torch.empty(sizes, dtype=torch.bool, device=context.device)
    longest = max(range(len(sizes)), key=lambda d: sizes[d], default=0)
    key, size = stream_key(*context.rng, *site), sizes[longest] if sizes else 1
    step, whole = max(1, -(-size // MASK_PARTS)), num_elements(shape, batch_slice)
    for first in range(0, size, step):
        count = min(step, size - first)
        index = torch.zeros((), dtype=torch.int64, device=context.device)
        for d, summand in enumerate(summands):
            is_cut = d == longest
            index = index + (summand.narrow(0, first, count) if is_cut else summand)
        part = mask.narrow(longest, first, count) if sizes else mask
        part.copy_(keep_mask(index, key, 1.0 - probability, whole))
    return mask


def attention(
    context: StepContext,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
    probability: float,
    site: tuple[int, int],
    shape: tuple[int, ...],
    digits: tuple[ShardDigits, ...],
    batch_slice: BatchSlice,
    key_heads: tuple[int, ShardDigits],
) -> Tensor:
    """Attention on some batches, heads and query rows.

    query [..., h, s, e], key and value [..., g, t, e], mask broadcast to [..., h, s, t], all local.
    shape, digits: of the scores [..., h, s, t] on all ranks; batch_slice: as in dropout. key_heads:
    number of key heads in all, and how they are sharded. probability: of dropping a weight.
    """
    count, key_digits = key_heads
    if len(shape) > 3 and shape[-3] != count:
        heads = key_heads_of(context.mesh, shape[-3], digits[-3], count, key_digits)
        key, value = key.index_select(-3, heads), value.index_select(-3, heads)
    if is_causal:
        rows = local_indices(shape[-2], shard_indices_of(context.mesh, digits[-2]), context.device)
        mask = rows.unsqueeze(1) >= torch.arange(shape[-1], device=context.device)
    if probability == 0.0:
        return functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    scores = query @ key.transpose(-2, -1) * (scale or query.shape[-1] ** -0.5)
    if mask is not None and mask.dtype == torch.bool:
        lowest = torch.finfo(scores.dtype).min
        # A row without any key gives zeros, not NaN.
        weights = scores.masked_fill(~mask, lowest).softmax(-1).masked_fill(~mask, 0.0)
    else:
        weights = (scores if mask is None else scores + mask).softmax(-1)
    drop = dropout_mask(context, probability, site, shape, digits, batch_slice)
    return _scaled(weights, drop, probability) @ value


def _scaled(x: Tensor, mask: Tensor, probability: float) -> Tensor:
    return x * mask / (1.0 - probability) if probability < 1.0 else x * 0.0


LOCAL_OPS: dict[str, Callable[..., Any]] = {
    "mean": divide_by_ranks,
    "reshape": reshape,
    "valid_rows": valid_rows,
    "embedding": embedding,
    "embedding_bag": local_bags,
    "expert_linear": local_experts,
    "dispatch": dispatch,
    "combine": combine,
    "cumsum": cumsum,
    "put_rows": put_rows,
    "take_rows": take_rows,
    "cross_entropy": cross_entropy,
    "linear_cross_entropy": linear_cross_entropy,
    "nll_loss": nll_loss,
    "dropout": dropout,
    "draw": local_draw,
    "batch_norm": batch_norm,
    "attention": attention,
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
}
