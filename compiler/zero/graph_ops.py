"""Graph ops that take parameters out of buckets (meshfold.zero.step), for autograd's backward.

UseBucket is created where its region first needs the bucket, after the whole previous region: so
its backward, which starts the reduction of the bucket's gradients, comes right after the last
gradient of its own region and before the previous region's backward.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshfold.zero.step import BucketUse


def wait_bucket(use: BucketUse) -> tuple[Tensor, ...]:
    """Graph op: a bucket in flight -> its parameters, whole. Backward starts the reduce-scatter."""
    return _use(use)


def replicate_bucket(use: BucketUse) -> tuple[Tensor, ...]:
    """Graph op: parameters Invariant -> Replicate. Backward starts the all-reduce."""
    return _use(use)


def start_ahead(ahead: Callable[[], None]) -> None:
    """Graph op: start the gathers that the program wants in flight from here on."""
    ahead()


def _use(use: BucketUse) -> tuple[Tensor, ...]:
    if use.token is None:
        return tuple(use.members())
    members: tuple[Tensor, ...] = _UseBucket.apply(use, use.token)  # type: ignore[no-untyped-call]
    work = use.weight_work
    return members if work is None else tuple(map(work.tap, members))


class _UseBucket(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, use: BucketUse, token: Tensor) -> tuple[Tensor, ...]:
        ctx.use = use
        ctx.set_materialize_grads(False)
        # Aliases: autograd writes itself into what is returned, and `use` keeps the originals.
        return tuple(m.detach() for m in use.members())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, Tensor]:
        ctx.use.start_reduction(gradients)
        return None, ctx.use.shards[0].new_empty(0)
