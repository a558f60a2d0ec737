"""Running a region so that autograd keeps only what arrives: its forward runs again in backward.

    forward    run the graph; of every tensor that autograd wants to keep, it gets a number instead
    backward   at the first number that comes back: run the graph again from what arrived, note the
               tensors in the same order, stop at the last one; hand each out, once

The second run repeats the first on every rank alike, since nothing in it depends on when it runs:
its collectives come in the same order (backward runs in the same order on all ranks), parameters
are gathered again, dropout draws from the same (seed, step, site). It starts no gathers ahead, and
its own autograd graph is dropped unused, so each bucket's gradients are reduced once. A start and
its wait are neighbours in an eager graph and keep nothing: stopping leaves no collective in flight.

torch.utils.checkpoint does the same with more parts (it loads torch._dynamo, and its hold on the
inputs would go through the notes of meshfold.zero.step).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from meshfold.distributed.rank_mesh import RankMesh
from meshfold.distributed.replayed_counts import KeptCounts
from meshfold.errors import MeshfoldError
from meshfold.zero.step import BucketUse, TrainingStep


class _StopRecomputation(BaseException):
    """All tensors that the backward needs are there. No Exception: nothing on the way, fx least of
    all, is to treat it as a failure."""


class Rerun:
    """What a second run of a region needs of the first: the values that arrived, in `arrived`,
    random numbers and autocast as they were, and the counts that ranks exchanged."""

    def __init__(self, mesh: RankMesh, arrived: Sequence[Tensor]) -> None:
        self.arrived = [x.detach().requires_grad_(x.requires_grad) for x in arrived]
        self._mesh = mesh
        self._rng = mesh.rng
        self._autocast = _autocast_state(mesh.device.type)
        self._versions = [x._version for x in arrived]
        self._counts = KeptCounts()

    @contextlib.contextmanager
    def keeping_counts(self) -> Iterator[None]:
        """While open, the first run."""
        before, self._mesh.counts = self._mesh.counts, self._counts
        try:
            yield
        finally:
            self._mesh.counts = before

    @contextlib.contextmanager
    def running(self) -> Iterator[list[Tensor]]:
        """While open, everything is as in the forward. Raises MeshfoldError for a value that was
        changed since."""
        if [x._version for x in self.arrived] != self._versions:
            raise MeshfoldError(
                "a tensor that a recomputed region needs was changed in place between forward and "
                "backward; update parameters and batches after backward"
            )
        mesh, now = self._mesh, self._mesh.rng
        mesh.rng = self._rng
        self._counts.start_again()
        autocast = torch.autocast(mesh.device.type, **self._autocast)
        try:
            with self.keeping_counts(), torch.enable_grad(), autocast:
                yield self.arrived
        finally:
            mesh.rng = now


class Recomputation:
    """One instance of a region with full recomputation, during one step.

    again: runs it a second time, from what arrived; uses: its buckets. Nothing here may refer to
    what the region makes, so the values inside die with the forward.
    """

    def __init__(
        self,
        step: TrainingStep,
        instance: int,
        again: Callable[[Sequence[Tensor]], Any],
        uses: Sequence[BucketUse],
    ) -> None:
        self._step = step
        self._instance = instance
        self._run_again = again
        self._uses = uses
        self._rerun: Rerun | None = None
        self._num_kept = 0
        self._again: list[Tensor | None] | None = None

    @contextlib.contextmanager
    def keeping_numbers(self, arrived: Sequence[Tensor]) -> Iterator[None]:
        """While open the region runs, from what arrived, and autograd keeps numbers."""
        self._rerun = Rerun(self._step.mesh, arrived)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._number, self._tensor)
        with self._rerun.keeping_counts(), hooks:
            yield
        if self._num_kept:
            for use in self._uses:
                use.will_be_read_again()

    def _number(self, _: Tensor) -> int:
        self._num_kept += 1
        return self._num_kept - 1

    def _tensor(self, number: int) -> Tensor:
        if self._again is None:
            self._again = self._recompute()
        tensor = self._again[number]
        assert tensor is not None, "autograd asks for what it keeps once"
        self._again[number] = None
        return tensor

    def _recompute(self) -> list[Tensor | None]:
        """What autograd would have kept of the forward, in order."""
        assert self._rerun is not None, "autograd asks after the forward"
        self._step.arrive(self._instance)
        found: list[Tensor | None] = []

        def note(tensor: Tensor) -> None:
            # Detached, or an op that keeps its own result would hold itself alive.
            found.append(tensor.detach())
            if len(found) == self._num_kept:
                raise _StopRecomputation

        hooks = torch.autograd.graph.saved_tensors_hooks(note, _never)
        try:
            with self._rerun.running() as arrived, hooks:
                self._run_again(arrived)
        except _StopRecomputation:
            pass
        assert len(found) == self._num_kept, "the second run differs from the first"
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
