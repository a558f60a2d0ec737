"""Cross entropy of logits that are kept in their own dtype, over all classes or a shard of them.

Losses are computed in float32 at least, and logits are widened a few rows at a time: there is never
a float32 copy of them all. The op meshfold::cross_entropy is that for all classes; capture writes
it where a model widens its logits first (meshfold.capture.rewrites.narrow_logits).
meshfold::linear_cross_entropy makes the logits itself, a chunk at a time
(meshfold.ops.fused.linear_cross_entropy). Importing this defines both ops.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meshfold.distributed.rank_mesh import RankMesh
from meshfold.ops.fused.class_losses import Targets, losses_of_sums
from meshfold.ops.fused.linear_cross_entropy import linear_class_losses
from meshfold.ops.fused.rms_norm import wide_dtype
from meshfold.sharding.indices import ShardDigits

CHUNK_NUMEL = 2**25
"""Numbers that are widened at a time: 128 MiB in float32. Derived: several times what fills a GPU,
and little beside the logits where these count."""

_NONE, _MEAN = 0, 1


def class_losses(
    mesh: RankMesh | None,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    num_classes: int,
    digits: ShardDigits,
) -> Tensor:
    """Losses of rows: logits [rows, own classes, ...], target [rows, ...], weight [classes],
    unsharded. digits: of the axes of `mesh` that shard the classes, which may be padded; empty
    where all classes are here, and no mesh is needed then."""
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        mesh, logits, target, weight, ignore_index, label_smoothing, num_classes, digits
    )
    return losses


def target_count(
    target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """What a mean over targets divides by: how many count, by the weights of their classes."""
    counts = target != ignore_index
    if weight is not None:
        counts = weight[torch.where(counts, target, 0)] * counts
    return counts.sum().to(dtype)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """As torch's cross entropy of the widened logits [rows, classes, ...] and targets that are
    numbers of classes [rows, ...]; reduction by the number that aten has for it."""
    num_classes = logits.shape[1]
    losses = class_losses(
        None, logits, target, weight, ignore_index, label_smoothing, num_classes, ()
    )
    return _reduced(losses, target, weight, reduction, ignore_index)


def linear_cross_entropy(
    input: Tensor,
    matrix: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    is_wide: bool = False,
) -> Tensor:
    """The same of logits input [rows, k] matrix [classes, k]^T + bias [classes], which are never
    whole; target [rows]. is_wide: a loss of narrow numbers is in float32, else in theirs."""
    losses = linear_class_losses(
        None,
        input,
        matrix,
        bias,
        target,
        weight,
        ignore_index,
        label_smoothing,
        matrix.shape[0],
        (),
    )
    found = _reduced(losses, target, weight, reduction, ignore_index)
    return found if is_wide else found.to(input.dtype)


def _reduced(
    losses: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> Tensor:
    if reduction == _NONE:
        return losses
    total = losses.sum()
    if reduction != _MEAN:
        return total
    return total / target_count(target, weight, ignore_index, total.dtype)


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Rows that are widened together."""
    rows = logits.shape[0]
    step = max(1, CHUNK_NUMEL * rows // max(logits.numel(), 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy over classes, or shards of them. The gradient of a loss of class_losses.py, in
    its words, is

        ((1 - e) w[t] + e W / V) exp(x - m) / z  -  (1 - e) w[t] [class is t]  -  e w / V

    Backward needs no communication. What is beyond the end of padded classes is not looked at and
    gets zeros.
    """

    @staticmethod
    def forward(
        ctx: Any,
        mesh: RankMesh | None,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        smoothing: float,
        num_classes: int,
        digits: ShardDigits,
    ) -> Tensor:
        wide = wide_dtype(logits)
        of = Targets.of(mesh, target, ignore_index, num_classes, digits)
        shares = of.shares(weight, wide).view(-1, *(1,) * (logits.dim() - 2))
        largest, sums = _row_sums(logits, of.column, shares, bool(smoothing))
        found = losses_of_sums(mesh, digits, of, largest, sums, weight, smoothing, num_classes)
        evenly = shares if smoothing else None
        places = of.counts, of.is_local, of.column
        ctx.save_for_backward(logits, found.normalizer, *places, found.factor, evenly)
        ctx.evenly = smoothing / num_classes, found.total
        ctx.num_own = of.own.numel()
        return found.losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        logits, normalizer, counts, is_local, column, factor, shares = ctx.saved_tensors
        each, total = ctx.evenly
        gradient = gradient.masked_fill(~counts, 0.0)
        of_all = (factor + each * total) * gradient
        of_target = -factor * is_local * gradient
        num_own = ctx.num_own
        result = torch.empty_like(logits)
        result[:, num_own:].zero_()
        for rows in _chunks(logits):
            x = logits[rows, :num_own].to(normalizer.dtype)
            x = _difference(x, normalizer[rows], logits).exp_()
            x *= of_all[rows].unsqueeze(1)
            x.scatter_add_(1, column[rows].unsqueeze(1), of_target[rows].unsqueeze(1))
            if each:
                x -= each * shares * gradient[rows].unsqueeze(1)
            result[rows, :num_own] = x
        return None, result, None, None, None, None, None, None


def _row_sums(
    logits: Tensor, column: Tensor, shares: Tensor, weighs: bool
) -> tuple[Tensor, Tensor]:
    """Of each row of the local classes: its maximum m; and the sum of exp(x - m), the number in
    `column` and, if it `weighs`, the sum of x by its shares, stacked."""
    largest = torch.empty_like(column, dtype=shares.dtype)
    sums = largest.new_empty((3 if weighs else 2, *column.shape))
    for rows in _chunks(logits):
        x = logits[rows, : shares.shape[0]].to(shares.dtype)
        largest[rows] = x.amax(1)
        sums[1, rows] = x.gather(1, column[rows].unsqueeze(1)).squeeze(1)
        if weighs:
            sums[2, rows] = (x * shares).sum(1)
        # A row of nothing but -inf has no maximum to be measured from.
        start = largest[rows].masked_fill(largest[rows] == float("-inf"), 0.0)
        sums[0, rows] = _difference(x, start, logits).exp_().sum(1)
    return largest, sums


def _difference(x: Tensor, of_rows: Tensor, logits: Tensor) -> Tensor:
    """x minus a number of each row, in place where x is a copy."""
    if x.dtype == logits.dtype:
        return x - of_rows.unsqueeze(1)
    return x.sub_(of_rows.unsqueeze(1))


torch.library.define(
    "meshfold::cross_entropy",
    "(Tensor self, Tensor target, Tensor? weight=None, int reduction=1, int ignore_index=-100, "
    "float label_smoothing=0.0) -> Tensor",
)
torch.library.impl("meshfold::cross_entropy", "CompositeImplicitAutograd", cross_entropy)
torch.library.define(
    "meshfold::linear_cross_entropy",
    "(Tensor input, Tensor matrix, Tensor target, Tensor? bias=None, Tensor? weight=None, "
    "int reduction=1, int ignore_index=-100, float label_smoothing=0.0, bool is_wide=False) "
    "-> Tensor",
)
torch.library.impl(
    "meshfold::linear_cross_entropy", "CompositeImplicitAutograd", linear_cross_entropy
)
