"""Cross entropy of logits that a linear layer makes, never whole: the chunked vocabulary loss.

    logits = x matrix^T + bias,  losses as of meshfold.ops.vocab_parallel_cross_entropy

Forward makes the logits of some rows at a time, and keeps one number a row, the normalizer
m + log z. Backward makes them again, some classes at a time, so that each chunk's gradient of the
matrix is one product and no sum over chunks:

    d = ((1 - e) w[t] + e W / V) exp(logits - normalizer)  -  (1 - e) w[t] [class is t]  -  e w / V
    d matrix[chunk] = d^T x,   d bias[chunk] = sum of rows of d,   dx = sum over chunks of d matrix

What is kept is x, the matrix and numbers of rows; the price is a fourth product. Liger kernels
(Hsu et al. 2024, arXiv:2410.10989) make the gradients in forward instead, which holds them until
backward, and which a sharded vocabulary does not allow without a collective per chunk.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meshfold.distributed.rank_mesh import RankMesh
from meshfold.ops.fused.class_losses import Targets, losses_of_sums
from meshfold.ops.fused.rms_norm import wide_dtype
from meshfold.sharding.indices import ShardDigits

NUM_CHUNKS = 8
"""The fewest chunks that logits are made in: as torchtune's chunked loss has by default. An eighth
of the logits is small beside what else a step holds, and products stay large."""

CHUNK_NUMEL = 2**26
"""Logits of a chunk at most: 256 MiB in float32."""


def linear_class_losses(
    mesh: RankMesh | None,
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    num_classes: int,
    digits: ShardDigits,
) -> Tensor:
    """Losses [rows], in float32 at least: x [rows, k], matrix [own classes, k], bias [own classes],
    target [rows], weight [classes], unsharded. digits: of the axes of `mesh` that shard the
    classes, which may be padded; empty where all classes are here, and no mesh is needed then."""
    losses: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        mesh, x, matrix, bias, target, weight, ignore_index, label_smoothing, num_classes, digits
    )
    return losses


def _chunks(size: int, numel: int) -> Iterator[slice]:
    """Chunks of a dim of `size`, of a tensor of `numel`."""
    count = max(NUM_CHUNKS, -(-numel // CHUNK_NUMEL))
    step = max(1, -(-size // count))
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def _logits(x: Tensor, matrix: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A chunk of logits, rounded as the model rounds them, then widened; a fresh tensor."""
    made = torch.nn.functional.linear(x, matrix, bias)
    return made.to(dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mesh: RankMesh | None,
        x: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        smoothing: float,
        num_classes: int,
        digits: ShardDigits,
    ) -> Tensor:
        wide = wide_dtype(x)
        of = Targets.of(mesh, target, ignore_index, num_classes, digits)
        shares = of.shares(weight, wide)
        largest, sums = _row_sums(x, matrix, bias, of.column, shares, bool(smoothing))
        found = losses_of_sums(mesh, digits, of, largest, sums, weight, smoothing, num_classes)
        evenly = shares if smoothing else None
        places = of.counts, of.is_local, of.column
        ctx.save_for_backward(x, matrix, bias, found.normalizer, *places, found.factor, evenly)
        ctx.evenly = smoothing / num_classes, found.total
        ctx.num_own = of.own.numel()
        return found.losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, matrix, bias, normalizer, counts, is_local, column, factor, shares = ctx.saved_tensors
        each, total = ctx.evenly
        gradient = gradient.masked_fill(~counts, 0.0)
        of_all = ((factor + each * total) * gradient).unsqueeze(1)
        of_target = -factor * is_local * gradient
        evenly = (each * gradient).unsqueeze(1) if each else None
        _, wants_x, wants_matrix, wants_bias, *_ = ctx.needs_input_grad
        of_x = torch.zeros_like(x, dtype=normalizer.dtype) if wants_x else None
        of_matrix = torch.empty_like(matrix) if wants_matrix else None
        of_bias = torch.empty_like(bias) if bias is not None and wants_bias else None
        for made in (of_matrix, of_bias):
            if made is not None:
                made[ctx.num_own :].zero_()
        for chunk in _chunks(ctx.num_own, x.shape[0] * ctx.num_own):
            part = matrix[chunk]
            here = None if bias is None else bias[chunk]
            d = _logits(x, part, here, normalizer.dtype).sub_(normalizer.unsqueeze(1)).exp_()
            d *= of_all
            place = column - chunk.start
            is_here = (place >= 0) & (place < part.shape[0])
            place = place.clamp(0, part.shape[0] - 1).unsqueeze(1)
            d.scatter_add_(1, place, (of_target * is_here).unsqueeze(1))
            if evenly is not None:
                d -= evenly * shares[chunk]
            d = d.to(x.dtype)
            if of_x is not None:
                of_x += d @ part
            if of_matrix is not None:
                of_matrix[chunk] = d.t() @ x
            if of_bias is not None:
                of_bias[chunk] = d.sum(0)
        of_x = None if of_x is None else of_x.to(x.dtype)
        return None, of_x, of_matrix, of_bias, None, None, None, None, None, None


def _row_sums(
    x: Tensor, matrix: Tensor, bias: Tensor | None, column: Tensor, shares: Tensor, weighs: bool
) -> tuple[Tensor, Tensor]:
    """Of the logits of each row and the local classes: their maximum m; and the sum of
    exp(logit - m), the logit in `column` and, if it `weighs`, the sum of logits by their shares,
    stacked."""
    num_own = shares.shape[0]
    matrix = matrix[:num_own]
    bias = None if bias is None else bias[:num_own]
    largest = torch.empty_like(column, dtype=shares.dtype)
    sums = largest.new_empty((3 if weighs else 2, *column.shape))
    for rows in _chunks(x.shape[0], x.shape[0] * num_own):
        logits = _logits(x[rows], matrix, bias, shares.dtype)
        largest[rows] = logits.amax(1)
        sums[1, rows] = logits.gather(1, column[rows].unsqueeze(1)).squeeze(1)
        if weighs:
            sums[2, rows] = (logits * shares).sum(1)
        # A row of nothing but -inf has no maximum to be measured from.
        start = largest[rows].masked_fill(largest[rows] == float("-inf"), 0.0)
        sums[0, rows] = logits.sub_(start.unsqueeze(1)).exp_().sum(1)
    return largest, sums
