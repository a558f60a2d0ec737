"""Messages between the stages of a pipeline: activations forward, gradients backward.

A message is one border of one microbatch: a tensor per value, to the neighbouring stage. A receive
is posted before the action that needs it, one action ahead; a send is never waited for before the
step ends. Messages carry tags, so that gloo matches them in any order; their order is right without
tags, too (cost_models/action_lists.py), as NCCL asks for.

A peer that died or hangs shows as a receive that fails or takes longer than the timeout. The error
names the stage and the action that was waited for.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshfold.collectives import ProcessMesh
from meshfold.cost_models.schedules import Action
from meshfold.errors import StageLostError
from meshfold.torch_ops import torch_dtype

MESSAGE_VALUES = 256
"""Most values that cross one border: what keeps the tags of two messages apart."""

Shapes = Sequence[tuple[tuple[int, ...], str]]
"""(local shape, dtype) per value."""


class StageLinks:
    """Links of this rank with the ranks of other devices on the same coordinates."""

    def __init__(self, mesh: ProcessMesh, axis: str) -> None:
        self._device = mesh.device
        self._group = mesh.group((axis,))
        self._ranks = dist.get_process_group_ranks(self._group)
        self._sent: list[tuple[Any, Tensor]] = []

    def send(self, device: int, number: int, values: Sequence[Tensor]) -> None:
        """Start sending message `number` of a step to a device."""
        self._sent = [(work, x) for work, x in self._sent if not work.is_completed()]
        for k, value in enumerate(values):
            # Kept until it is sent: nobody else may hold it.
            flat = value.detach().contiguous()
            tag = number * MESSAGE_VALUES + k
            work = dist.isend(flat, self._ranks[device], group=self._group, tag=tag)
            self._sent.append((work, flat))

    def receive(self, device: int, number: int, shapes: Shapes) -> "Receipt":
        """Start receiving message `number` of a step from a device."""
        works = []
        for k, (shape, dtype) in enumerate(shapes):
            value = torch.empty(shape, dtype=torch_dtype(dtype), device=self._device)
            tag = number * MESSAGE_VALUES + k
            work = dist.irecv(value, self._ranks[device], group=self._group, tag=tag)
            works.append((work, value))
        return Receipt(works, self._ranks[device])

    def finish(self, action: Action, timeout_s: float) -> None:
        """Wait until everything is sent. action: the last one that was run."""
        for work, _ in self._sent:
            _wait(work, timeout_s, f"stage {action.stage}, behind its last action {action}, waited")
        self._sent.clear()

    def broadcast(self, value: Tensor, device: int) -> Tensor:
        """The value of one device, on all."""
        dist.broadcast(value, self._ranks[device], group=self._group)
        return value


class Receipt:
    """A message on its way here from `rank`."""

    def __init__(self, works: Sequence[tuple[Any, Tensor]], rank: int) -> None:
        self._works = works
        self._rank = rank

    def wait(self, action: Action, needed: Action, timeout_s: float) -> list[Tensor]:
        """The values. Raises StageLostError if they do not come."""
        who = (
            f"stage {action.stage} waited before {action} for {needed} of stage {needed.stage} "
            f"on rank {self._rank}"
        )
        for work, _ in self._works:
            _wait(work, timeout_s, who)
        return [value for _, value in self._works]


def _wait(work: Any, timeout_s: float, who: str) -> None:
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise StageLostError(
            f"{who}, at most {timeout_s:g} s, and lost it; see what that rank says, or give "
            f"train_step a longer timeout_s ({str(error).splitlines()[0]})"
        ) from error
