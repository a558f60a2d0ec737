"""Full recomputation of a region: autograd saves only what arrives, the backward runs its forward
once more.

    forward    run the graph; for every tensor that autograd wants to save, it gets a number instead
    backward   at the first number that comes back: run the graph a second time from what arrived,
               note the tensors in the same order, stop at the last one; return each once

The second run repeats the first on every rank alike, since nothing in it depends on when it runs:
its collectives come in the same order (backward runs in the same order on all ranks), parameters
are regathered, dropout draws from the same (seed, step, site). It starts no gathers ahead, and
its own autograd graph is dropped unused, so each group's gradients are reduced once. A start and
its wait are neighbours in an eager graph and save nothing: stopping leaves no collective in flight.

torch.utils.checkpoint does the same with more machinery (it loads torch._dynamo, and the inputs it
saves would go through the notes of meshfold.zero.step).
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshfold.distributed.replayed_counts import RecordedCounts
from meshfold.distributed.step_context import StepContext
from meshfold.errors import MeshfoldError
from meshfold.zero.step import GroupUse, TrainingStep

CHANGED = (
    "a tensor that a recomputed region needs was changed in place between forward and backward; "
    "update parameters and batches after backward"
)


class _StopRecomputation(BaseException):
    """All tensors that the backward needs are there. No Exception: nothing on the way, fx least of
    all, is to treat it as a failure."""


class Rerun:
    """What a second run of a region needs of the first: the tensors that arrived, in `arrived`,
    autocast as it was, and the context of its step with the counts that ranks exchanged."""

    def __init__(self, context: StepContext, arrived: Sequence[Tensor]) -> None:
        self.arrived = [x.detach().requires_grad_(x.requires_grad) for x in arrived]
        self._counts = RecordedCounts()
        self.first = replace(context, counts=self._counts)
        """The context of the first run."""
        self._autocast = _autocast_state(context.device.type)
        self._versions = [x._version for x in arrived]

    def drop(self, numbers: Collection[int]) -> None:
        """Forget tensors that the second run does not read, by number."""
        for k in numbers:
            self.arrived[k] = nothing = torch.empty(0)
            self._versions[k] = nothing._version

    @contextlib.contextmanager
    def running(self) -> Iterator[StepContext]:
        """While open, autograd is as in the forward; gives the context of the second run. Raises
        MeshfoldError for a tensor that was changed since."""
        if [x._version for x in self.arrived] != self._versions:
            raise MeshfoldError(CHANGED)
        second = replace(self.first, counts=self._counts.replayed())
        with torch.enable_grad(), torch.autocast(second.device.type, **self._autocast):
            yield second


Run = Callable[[StepContext, Sequence[Tensor]], Any]
"""Runs a region on what arrived."""


class Recomputation:
    """One instance of a region with full recomputation, during one step.

    recompute: runs it a second time; uses: its groups. Nothing here may refer to what the region
    computes, so the values inside die with the forward.
    """

    def __init__(
        self,
        step: TrainingStep,
        instance: int,
        recompute: Run,
        uses: Sequence[GroupUse],
    ) -> None:
        self._step = step
        self._instance = instance
        self._run_recompute = recompute
        self._uses = uses
        self._rerun: Rerun | None = None
        self._num_saved = 0
        self._recomputed: list[Tensor | None] | None = None

    @contextlib.contextmanager
    def saving_numbers(self, arrived: Sequence[Tensor]) -> Iterator[StepContext]:
        """While open the region runs, from what arrived, and autograd saves numbers. Gives the
        context to run it in."""
        self._rerun = Rerun(self._step.context, arrived)
        with torch.autograd.graph.saved_tensors_hooks(self._number, self._tensor):
            yield self._rerun.first
        if self._num_saved:
            for use in self._uses:
                use.will_be_recomputed()

    def _number(self, _: Tensor) -> int:
        self._num_saved += 1
        return self._num_saved - 1

    def _tensor(self, number: int) -> Tensor:
        if self._recomputed is None:
            self._recomputed = self._recompute()
        tensor = self._recomputed[number]
        assert tensor is not None, "autograd asks for what it saves once"
        self._recomputed[number] = None
        return tensor

    def _recompute(self) -> list[Tensor | None]:
        """What autograd would have saved of the forward, in order."""
        assert self._rerun is not None, "autograd asks after the forward"
        self._step.arrive(self._instance)
        found: list[Tensor | None] = []

        def note(tensor: Tensor) -> None:
            # Detached, or an op that saves its own result would keep itself alive.
            found.append(tensor.detach())
            if len(found) == self._num_saved:
                raise _StopRecomputation

        hooks = torch.autograd.graph.saved_tensors_hooks(note, _never)
        try:
            with self._rerun.running() as context, hooks:
                self._run_recompute(context, self._rerun.arrived)
        except _StopRecomputation:
            pass
        assert len(found) == self._num_saved, "the second run differs from the first"
        return found


def _never(_: Any) -> Tensor:
    raise AssertionError("the graph of a second run has no backward")


def start_nothing() -> None:
    """The gathers that come next in forward are no concern of the backward."""


def _autocast_state(device_type: str) -> dict[str, Any]:
    return {
        "enabled": torch.is_autocast_enabled(device_type),
        "dtype": torch.get_autocast_dtype(device_type),
    }
