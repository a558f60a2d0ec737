"""Graph ops that take parameters out of groups (meshfold.zero.step), for autograd's backward.

UseGroup is created where its region first needs the group, after the whole previous region: so
its backward, which starts the reduction of the group's gradients, comes right after the last
gradient of its own region and before the previous region's backward.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshfold.zero.step import GroupUse
from meshfold.zero.step_ends import new_token


def wait_group(use: GroupUse) -> tuple[Tensor, ...]:
    """Graph op: a group in flight -> its parameters, unsharded. Backward starts the
    reduce-scatter."""
    return _use(use)


def replicate_group(use: GroupUse) -> tuple[Tensor, ...]:
    """Graph op: parameters Invariant -> Replicate. Backward starts the all-reduce."""
    return _use(use)


def start_ahead(ahead: Callable[[], None]) -> None:
    """Graph op: start the gathers that the program wants in flight from here on."""
    ahead()


def _use(use: GroupUse) -> tuple[Tensor, ...]:
    if use.token is None:
        return tuple(use.members())
    deferred = use.deferred
    # What ends the step waits for the gradients of all groups, which come one after the other.
    token = use.token if deferred is None else deferred.hold(use.token)
    members: tuple[Tensor, ...] = _UseGroup.apply(use, token)  # type: ignore[no-untyped-call]
    return members if deferred is None else tuple(map(deferred.tap, members))


class _UseGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, use: GroupUse, token: Tensor) -> tuple[Tensor, ...]:
        ctx.use = use
        ctx.set_materialize_grads(False)
        # Aliases: autograd writes itself into what is returned, and `use` keeps the originals.
        return tuple(m.detach() for m in use.members())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, Tensor]:
        ctx.use.start_reduction(gradients)
        return None, new_token(ctx.use.shards[0])
