"""Messages between the stages of a pipeline: activations forward, gradients backward.

A message is one stage boundary of one microbatch: a tensor per value, to the neighbouring stage. A
receive is posted before the action that needs it, one action ahead; a send is never waited for
before the step ends. Messages carry tags, so that gloo matches them in any order. NCCL knows no
tags and runs what two ranks exchange in one group in the order of posting: so each kind of pass has
a group of its own per direction, and in it messages are posted for receiving in the order in which
they are sent (cost_models/pipeline/action_checks.py). Run under gloo only so far.

A peer that died or hangs shows as a receive that fails or takes longer than the timeout. The error
names the stage and the action that was waited for.
"""

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshfold.cost_models.pipeline.actions import Pass, StageAction
from meshfold.distributed.rank_mesh import ProcessMesh
from meshfold.distributed.waiting import Place, cause
from meshfold.errors import StageLostError
from meshfold.torch_compat.dtypes import torch_dtype

MESSAGE_VALUES = 256
"""Most values that cross one boundary: what keeps the tags of two messages apart."""

_DIRECTIONS = (
    (Pass.FORWARD, True),
    (Pass.BACKWARD, False),
    (Pass.FORWARD, False),
    (Pass.BACKWARD, True),
)
"""(kind, whether from a device to one of a higher number); the last two where devices have several
chunks: between last and first, or on the way back of a V."""

Shapes = Sequence[tuple[tuple[int, ...], str]]
"""(local shape, dtype) per value."""


class StageLinks:
    """Links of this rank with the ranks of other devices on the same coordinates."""

    def __init__(self, mesh: ProcessMesh, axis: str, *, wraps: bool) -> None:
        """wraps: whether both kinds go both ways. Called on all ranks together."""
        self._device = mesh.device
        self._place = mesh.place
        self._own = mesh.coord(axis)
        self._all = mesh.group((axis,))
        self._ranks = dist.get_process_group_ranks(self._all)
        self._groups: dict[tuple[Pass, bool], dist.ProcessGroup] = {}
        for kind, is_up in _DIRECTIONS if wraps else _DIRECTIONS[:2]:
            for ranks in mesh.mesh.groups((axis,)):
                if (group := mesh.new_group(ranks)) is not None:
                    self._groups[kind, is_up] = group
        self._sent: list[tuple[Any, Tensor]] = []

    def send(self, device: int, action: StageAction, number: int, values: Sequence[Tensor]) -> None:
        """Start sending what an action computed, message `number` of a step, to a device."""
        group = self._groups[action.kind, self._own < device]
        self._forget_sent()
        for k, value in enumerate(values):
            # Kept until it is sent: nobody else may hold it.
            flat = value.detach().contiguous()
            tag = number * MESSAGE_VALUES + k
            rank = self._ranks[device]
            with lost_stage(f"stage {action.stage} sent {action} to rank {rank}", self._place):
                work = dist.isend(flat, rank, group=group, tag=tag)
            self._sent.append((work, flat))

    def receive(self, device: int, action: StageAction, number: int, shapes: Shapes) -> "Receipt":
        """Start receiving what an action computes, message `number` of a step, from a device."""
        group = self._groups[action.kind, device < self._own]
        self._forget_sent()
        works, rank = [], self._ranks[device]
        for k, (shape, dtype) in enumerate(shapes):
            value = torch.empty(shape, dtype=torch_dtype(dtype), device=self._device)
            tag = number * MESSAGE_VALUES + k
            who = f"device {self._own} asked for {action} of stage {action.stage} on rank {rank}"
            with lost_stage(who, self._place):
                work = dist.irecv(value, rank, group=group, tag=tag)
            works.append((work, value))
        return Receipt(works, rank, self._place)

    def _forget_sent(self) -> None:
        self._sent = [(work, x) for work, x in self._sent if not work.is_completed()]

    def finish(self, action: StageAction) -> None:
        """Wait until everything is sent. action: the last one that was run."""
        for work, _ in self._sent:
            who = f"stage {action.stage}, behind its last action {action}, waited"
            wait_for(work, who, self._place)
        self._sent.clear()

    def broadcast(self, value: Tensor, device: int) -> Tensor:
        """The loss of one device, on all. Raises StageLostError if it does not come."""
        work = dist.broadcast(value, self._ranks[device], group=self._all, async_op=True)
        who = f"device {self._own} waited for the loss of rank {self._ranks[device]}"
        wait_for(work, who, self._place)
        return value


class Receipt:
    """A message on its way here from `rank`."""

    def __init__(self, works: Sequence[tuple[Any, Tensor]], rank: int, place: Place) -> None:
        self._works = works
        self._rank = rank
        self._place = place

    def wait(self, action: StageAction, needed: StageAction) -> list[Tensor]:
        """The values. Raises StageLostError if they do not come."""
        who = (
            f"stage {action.stage} waited before {action} for {needed} of stage {needed.stage} "
            f"on rank {self._rank}"
        )
        for work, _ in self._works:
            wait_for(work, who, self._place)
        return [value for _, value in self._works]


def wait_for(work: Any, who: str, place: Place) -> None:
    """Wait for a message or collective. Raises StageLostError, beginning with `who`."""
    with lost_stage(who, place):
        work.wait(timedelta(seconds=place.timeout_s))


@contextlib.contextmanager
def lost_stage(who: str, place: Place) -> Iterator[None]:
    """A context that needs another stage. Raises StageLostError, beginning with `who`, for a
    RuntimeError of torch."""
    try:
        yield
    except RuntimeError as error:
        raise StageLostError(
            f"{who}{place}: {cause(error, place.timeout_s)}; look for the first error of that "
            "rank, or give train_step a longer timeout_s"
        ) from error
