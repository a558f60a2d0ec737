"""Cumulative sums along a dim that is sharded.

A rank sums along its own runs, [.., runs, width, ..]; what all runs add up to is known to all,

    out[run, i] = sum of x[run, :i + 1] + sum of the totals of the runs before

and of the backward the same holds from the end.
"""

from typing import Any

import torch
from torch import Tensor

from meshfold.distributed.rank_mesh import RankMesh, all_reduced
from meshfold.distributed.step_context import StepContext
from meshfold.sharding.indices import ShardDigits, shard_indices_of
from meshfold.sharding.slicing import local_indices


def cumsum(
    context: StepContext,
    x: Tensor,
    dim: int,
    dtype: torch.dtype | None,
    size: int,
    digits: ShardDigits,
) -> Tensor:
    """This rank's shard of the cumulative sum along `dim`, of `size` on the unsharded tensor and
    sharded by `digits`."""
    if dtype is not None:
        x = x.to(dtype)
    elif not (x.is_floating_point() or x.is_complex()):
        x = x.to(torch.int64)
    out: Tensor = _Scan.apply(context.mesh, x, dim, size, digits)  # type: ignore[no-untyped-call]
    return out


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mesh: RankMesh, x: Tensor, dim: int, size: int, digits: ShardDigits
    ) -> Tensor:
        ctx.given = mesh, dim, size, digits
        return _scanned(mesh, x, dim, size, digits, from_end=False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        mesh, dim, size, digits = ctx.given
        back = _scanned(mesh, gradient, dim, size, digits, from_end=True)
        return None, back, None, None, None


def _scanned(
    mesh: RankMesh, x: Tensor, dim: int, size: int, digits: ShardDigits, *, from_end: bool
) -> Tensor:
    indices = shard_indices_of(mesh, digits)
    width = min(size // (blocks * num_ranks) for blocks, num_ranks, *_ in indices)
    mine = local_indices(size, indices, mesh.device)[::width] // width
    runs = torch.unflatten(x, dim, (len(mine), width))
    summed = _summed(runs, dim + 1, from_end)
    own = runs.sum(dim + 1)
    totals = own.new_zeros((*own.shape[:dim], size // width, *own.shape[dim + 1 :]))
    totals = totals.index_copy(dim, mine, own)
    totals = all_reduced(mesh, totals, tuple(axis for axis, *_ in digits))
    before = (_summed(totals, dim, from_end) - totals).index_select(dim, mine)
    return (summed + before.unsqueeze(dim + 1)).flatten(dim, dim + 1)


def _summed(x: Tensor, dim: int, from_end: bool) -> Tensor:
    return x.flip(dim).cumsum(dim).flip(dim) if from_end else x.cumsum(dim)
