"""What one rank does in a step, as events: compute, collectives, and the moments of gathers and
reductions. Folded: equal instances share one description. meshfold.plan_file.event_text writes an
event as one line.

A region has a list of events per direction, in the order in which the runtime issues them
(meshfold.zero.step, meshfold.runtime.runner):

    compute            kernels; has seconds
    inline             a collective that is waited for where it stands
    unshard g          forward: wait for the gather of parameter group g
    forward_prefetch   forward: the gathers of the next instance that gathers start
    pre_backward       backward: wait for the own gathers, reshard later instances, start the
                       gathers of the instance before
    backward_unshard   as pre_backward, but the gathers of the instance before start at
    backward_prefetch  which stands where the schedule has it
    recompute          backward: what full recomputation runs of the forward
    start n            a collective, number n of its region and direction, that is waited for by
    wait n
    reduce g           backward: the reduction of the gradients of parameter group g starts
    epilogue           the events from here to the next `epilogue` (or the end) are one step of the
                       region's epilogue, which the next region in this direction runs
    run_epilogue       the next step of the epilogue of the region before, if one is left
    produce c          chunk c of the chunked boundary value for the next region is computed
    consume c          chunk c from the region before is read: its epilogue runs until it is there

The epilogue of a region ends before the region that runs it does, and before that region starts
gathers ahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from meshfold.ir.bucketing import GroupRef
from meshfold.ir.cluster import OVERLAP_SLOWDOWN
from meshfold.ir.limits import Bytes, Limits, Positive, Seconds

EventKind = Literal[
    "compute",
    "inline",
    "unshard",
    "forward_prefetch",
    "pre_backward",
    "backward_unshard",
    "backward_prefetch",
    "recompute",
    "start",
    "wait",
    "reduce",
    "epilogue",
    "run_epilogue",
    "produce",
    "consume",
]


@dataclass(frozen=True, slots=True)
class CollectiveEvent:
    """A collective of one rank."""

    kind: str
    axes: tuple[str, ...]
    """Of the mesh, acting as one group."""
    link: str
    """The slowest level that it crosses."""
    num_bytes: Bytes
    """As CostModel.collective_s takes them."""
    seconds: float
    """Alone on the link; of one in steps, of all together."""
    steps: tuple["CollectiveEvent", ...] = ()
    """The steps of each of its pieces, where it is hierarchical (meshfold.ir.node_groups); of the
    reduce-scatter of HSDP, itself and the all-reduce over replicas."""
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a region; see the module docstring."""

    kind: EventKind
    seconds: float = 0.0
    inside_bytes: int = 0
    """The most that is alive inside the instance while it lasts, allocated there and not yet freed.
    """
    number: int = -1
    """Of unshard and reduce the parameter group's, of start and wait their own, of produce and
    consume the chunk's."""
    collective: CollectiveEvent | None = None


@dataclass(frozen=True, slots=True)
class ParameterGroupEvents:
    """Parameters of one region that are gathered, and whose gradients are reduced, together."""

    gather: CollectiveEvent | None
    reduce: CollectiveEvent | None
    unsharded_bytes: Bytes
    """Of what is computed from the shards (gathered, or cast)."""
    flat_bytes: Bytes
    """Of the gradients while they are reduced."""
    result_bytes: Bytes
    """Of the reduced gradients."""
    saved: bool
    """Whether the backward reads the gathered parameters."""
    dtype: str = ""
    """Of the gradients; empty where it is not known."""
    read_dtype: str = ""
    """In which ops read the parameters; empty where it is not known."""
    is_unbucketed: bool = False
    """Whether it is one parameter that is never coalesced with others and whose gradient is what is
    reduced."""
    adds_to_sum: bool = False
    """Whether the gradients are added to those of earlier microbatches, which are what is reduced:
    there is no buffer besides."""

    @property
    def reduces_gradient(self) -> bool:
        """Whether the reduction needs no buffer: it reads the gradient itself."""
        return self.is_unbucketed and self.dtype == self.read_dtype


@dataclass(frozen=True)
class RegionEvents:
    """One region whose values arrive in certain layouts."""

    name: str
    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    groups: tuple[ParameterGroupEvents, ...] = ()
    reshard_after_forward: bool = True
    """Whether gathered parameters are freed after the forward (ZeRO 3)."""
    recomputed: tuple[Event, ...] = ()
    """What the event `recompute` stands for: compute and inline collectives."""

    def __post_init__(self) -> None:
        if any(event.kind not in ("compute", "inline") for event in self.recomputed):
            raise ValueError(f"region {self.name}: recomputed has compute and collectives alone")
        for events in (self.forward, self.backward):
            in_flight: set[int] = set()
            for event in events:
                if event.kind == "start":
                    in_flight.add(event.number)
                elif event.kind == "wait" and event.number not in in_flight:
                    raise ValueError(f"region {self.name}: wait {event.number} has no start")
                elif event.kind == "wait":
                    in_flight.remove(event.number)
                elif event.kind in ("unshard", "reduce") and event.number >= len(self.groups):
                    raise ValueError(
                        f"region {self.name}: {event.kind} {event.number} is of none of its "
                        f"{len(self.groups)} parameter groups"
                    )

    @property
    def unshards(self) -> bool:
        """Whether parameters are gathered or cast for it."""
        return any(group.unsharded_bytes for group in self.groups)


@dataclass(frozen=True, slots=True)
class ReduceBucket:
    """Reductions of several parameter groups in one collective, which starts when the last of them
    would have (meshfold.ir.bucketing)."""

    groups: tuple[GroupRef, ...]
    collective: CollectiveEvent


@dataclass(frozen=True, slots=True)
class AllGatherBucket:
    """Gathers of several parameter groups in one collective, which starts where that of the first
    would."""

    groups: tuple[GroupRef, ...]
    collective: CollectiveEvent
    regather: CollectiveEvent | None = None
    """The gather of those that the backward gathers again; None if there are none."""


@dataclass(frozen=True)
class StepEvents:
    """A step without microbatches."""

    regions: tuple[RegionEvents, ...]
    instances: tuple[int, ...]
    """Numbers of `regions`, in order of execution."""
    trailing: tuple[CollectiveEvent, ...]
    """Collectives behind all others: gradients of shards that other axes have summands of."""
    optimizer_s: Seconds
    resident_bytes: tuple[int, ...]
    """What is resident besides what is inside an instance, gathered or in a bucket: at the moments
    of the forwards of all instances, then of their backwards, then of the optimizer (with what that
    allocates)."""
    fixed_bytes: Bytes
    """States, batch, reserve."""
    slowdown: Annotated[float, Limits(1, 2)] = OVERLAP_SLOWDOWN
    """Of compute and collectives that overlap."""
    reduce_buckets: tuple[ReduceBucket, ...] = ()
    """In place of the reductions of the groups that they hold."""
    allgather_buckets: tuple[AllGatherBucket, ...] = ()
    """In place of the gathers of the groups that they hold."""
    adds_shards: bool = False
    """Whether what is reduce-scattered in the backward is waited for, and added to the sums of the
    microbatches, when the backward of the next region is over."""

    def __post_init__(self) -> None:
        if any(not 0 <= r < len(self.regions) for r in self.instances):
            raise ValueError(f"instances: there are {len(self.regions)} regions")
        if len(self.resident_bytes) != 2 * len(self.instances) + 1:
            raise ValueError(
                f"resident_bytes: {len(self.instances)} instances have "
                f"{2 * len(self.instances) + 1} moments, not {len(self.resident_bytes)}"
            )
        self._check_buckets("reduce_buckets", [b.groups for b in self.reduce_buckets])
        self._check_buckets("allgather_buckets", [b.groups for b in self.allgather_buckets])

    def _check_buckets(self, name: str, buckets: Sequence[tuple[GroupRef, ...]]) -> None:
        """Refuses a parameter group that does not exist, lacks the collective or is there twice."""
        seen: set[GroupRef] = set()
        for group in (group for groups in buckets for group in groups):
            if group in seen or not self._has(group, gathers=name == "allgather_buckets"):
                raise ValueError(f"{name}: {group} is there twice, or no group that does this")
            seen.add(group)

    def _has(self, group: GroupRef, *, gathers: bool) -> bool:
        """Whether there is such a parameter group, and it gathers, or reduces."""
        instance, number = group
        if not 0 <= instance < len(self.instances):
            return False
        groups = self.regions[self.instances[instance]].groups
        if not 0 <= number < len(groups):
            return False
        return (groups[number].gather if gathers else groups[number].reduce) is not None


@dataclass(frozen=True, slots=True)
class OverlapRow:
    """The collectives of one kind over the same axes, of a step."""

    kind: str
    axes: tuple[str, ...]
    count: Positive
    hidden_s: Seconds
    """Overlapped by compute."""
    exposed_s: Seconds
    """While compute waits."""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A simulated step, in a pipeline of the device that ends last; step_s is the sum of what
    compute does and what it waits."""

    compute_s: Seconds
    contention_s: Seconds
    """What compute loses to collectives that overlap with it."""
    exposed_s: Seconds
    """What compute waits for collectives; in a pipeline for the link to the host, too."""
    overlap: tuple[OverlapRow, ...]
    peak_bytes: Bytes
    """With microbatches that of the memory model, which is not simulated; peak_s is 0 then."""
    peak_s: Seconds
    """When memory is at its peak, from the start of the step."""
    bubble_s: Seconds = 0.0
    """What the device waits for other stages, transfers included."""

    @property
    def step_s(self) -> Seconds:
        return self.compute_s + self.contention_s + self.exposed_s + self.bubble_s

    @property
    def parts(self) -> dict[str, float]:
        """What step_s is the sum of, by name; bubble only where there is one."""
        parts = {
            "compute": self.compute_s,
            "slower beside collectives": self.contention_s,
            "exposed communication": self.exposed_s,
        }
        return parts | ({"bubble": self.bubble_s} if self.bubble_s else {})

    @property
    def hidden_share(self) -> Seconds:
        """Of the seconds of all collectives; 1 where there are none."""
        hidden_s = sum(row.hidden_s for row in self.overlap)
        total_s = hidden_s + sum(row.exposed_s for row in self.overlap)
        return hidden_s / total_s if total_s else 1.0
