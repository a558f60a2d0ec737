"""What the ops of an emitted graph know of the step that runs: the first argument of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from meshfold.distributed.deferred_weight_grads import DeferredWeightGrads
from meshfold.distributed.rank_mesh import RankMesh
from meshfold.distributed.replayed_counts import RecordedCounts, ReplayedCounts


@dataclass(frozen=True)
class StepContext:
    """One forward on one rank. Another microbatch, a second run of a region or a graph that defers
    gradients has a context of its own (dataclasses.replace); backward nodes refer to the context of
    their forward, so nothing is set and restored.
    """

    mesh: RankMesh
    """This rank among the others."""
    rng: tuple[int, int] = (0, 0)
    """(seed, step) of the counter-based generator (meshfold.ops.counter_rng)."""
    microbatch: int = 0
    """Number of the microbatch."""
    slices_own_batch: bool = False
    """Whether microbatches are slices of each rank's slice of the batch, not of the global one."""
    targets: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """By (instance, op) of the whole program, how many targets of the step a loss divides by."""
    deferred: DeferredWeightGrads | None = None
    """Where gradients of weights wait under a schedule that splits the backward; this object is
    advanced by ops, and run by the schedule."""
    counts: RecordedCounts | ReplayedCounts | None = None
    """Row counts of a region that runs twice; advanced by ops."""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.mesh.device
