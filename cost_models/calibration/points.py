"""What a profile measures: seconds of kernels, of pieces of models, and of collectives.

Work is counted as meshfold.cost_models.op_costs.compute counts it, so that what is fitted to these
points means the same as what plans are priced with.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from meshfold.cost_models.hardware.topology import GroupShape
from meshfold.ir.limits import Count, Positive, Seconds

KernelKind = Literal["launch", "memory", "gemm", "attention", "block"]


@dataclass(frozen=True)
class KernelPoint:
    """Kernels that ran one after the other. block: forward and backward of a piece of a model."""

    kind: KernelKind
    dtype: str
    """Of the products."""
    kernels: Positive
    """Calls that the cost model charges a start for."""
    flops: float
    """Of products; 0 of kernels that only move bytes."""
    attention_flops: float
    """Of attention: those that heads of 128 features would take as long for."""
    num_bytes: float
    """Of memory traffic."""
    seconds: Seconds

    @property
    def rate_per_s(self) -> float:
        """flops per second, or bytes per second where there are no flops."""
        return (self.flops + self.attention_flops or self.num_bytes) / self.seconds


@dataclass(frozen=True)
class CollectivePoint:
    """One collective of a group; all groups of that size worked at once."""

    kind: str
    """As meshfold.cost_models.op_costs.collective_time has them."""
    num_bytes: float
    """As there."""
    num_ranks: Positive
    num_nodes: Positive
    max_per_node: Positive
    min_per_node: Positive
    seconds: Seconds

    @property
    def shape(self) -> GroupShape:
        return GroupShape(self.num_ranks, self.num_nodes, self.max_per_node, self.min_per_node)


@dataclass(frozen=True)
class ContentionPoint:
    """A product and an all-reduce of about the same length, alone and at once."""

    compute_s: Seconds
    collective_s: Seconds
    both_s: Seconds

    @property
    def slowdown(self) -> float:
        """By which both are slower while both run, from 1 to 2: the longer one ends alone."""
        short_s, long_s = sorted((self.compute_s, self.collective_s))
        return min(max((self.both_s - long_s + short_s) / short_s, 1.0), 2.0) if short_s else 1.0


@dataclass(frozen=True)
class Machine:
    """Where points were measured: those of another machine, or of other processes, say nothing
    about it."""

    device: str
    backend: str
    """Of the collectives: gloo, nccl."""
    processes: Positive
    """All of which worked at once."""
    per_node: Positive
    cores: Positive
    """That the processes of a node share."""
    torch: str


@dataclass(frozen=True)
class Memory:
    """Of one device."""

    total_bytes: Positive
    reserve_bytes: Count
    """What the framework, its context and its communicators took."""


@dataclass(frozen=True)
class Profile:
    """All that was measured of a machine, by the names of the points."""

    version: Literal[2]
    """1 counted the flops of attention as they are, whatever the size of the heads."""
    machine: Machine
    finished: bool
    """Whether nothing is left to measure; else the next profile of this machine goes on."""
    memory: Memory
    kernels: Mapping[str, KernelPoint]
    collectives: Mapping[str, CollectivePoint]
    contention: ContentionPoint | None
    host_bytes_per_s: float | None
    """Of the slower direction between a device and its host; None where they are one or it was not
    measured."""

    @property
    def num_points(self) -> int:
        others = (self.contention, self.host_bytes_per_s)
        return len(self.kernels) + len(self.collectives) + sum(x is not None for x in others)
