"""What one rank does in a step, as events: compute, collectives, and the moments of gathers and
reductions. Folded: equal instances share one description. Layer 0: frozen data, and the one-line
texts of a plan file.

A region has a list of events per direction, in the order in which the runtime issues them
(meshfold.zero.step, meshfold.runtime.runner):

    compute     kernels                                         seconds
    inline      a collective that is waited for where it stands collective
    open b      forward: wait for the gather of bucket b
    ahead       forward: the gathers of the next instance that gathers start
    arrive      backward: own gathers are waited for, later instances let go, the next one's start
    settle      as arrive, but the next one's gathers start at
    before      which stands where the schedule has it
    again       backward: what full recomputation runs again
    start n     a collective, n of its region and direction, that is waited for by    collective
    wait n
    reduce b    backward: the reduction of the gradients of bucket b starts
    leave       what stands here and behind is the region's tail, up to the next `leave` one move of
                it: the next region in this direction runs it
    next        the next move of the tail of the region before in this direction, if one is left
    give p      part p of what is handed on over the border to the next region is there
    take p      part p from the region before is read: its tail runs until it is there

A tail is over when the region that runs it is, and before that starts gathers ahead.

In the file, an event is one line, its last word the bytes alive inside the region meanwhile:

    compute 0.00123 1048576
    all_gather dp,ep nvlink4-switch 33554432 0.0002 1048576      kind, axes, link, bytes, seconds
    start 3 all_gather tp nvlink4-switch 33554432 0.0002 1048576
    open 0 1048576
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from meshfold.ir.bucketing import Place
from meshfold.ir.cluster import OVERLAP_SLOWDOWN
from meshfold.ir.node_groups import PHASES

Action = Literal[
    "compute",
    "inline",
    "open",
    "ahead",
    "arrive",
    "settle",
    "before",
    "again",
    "start",
    "wait",
    "reduce",
    "leave",
    "next",
    "give",
    "take",
]
_NUMBERED_ACTIONS = ("open", "reduce", "wait", "give", "take")
_BARE_ACTIONS = ("ahead", "arrive", "settle", "before", "again", "leave", "next")


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of one rank. axes: of the mesh, acting as one group; link: the slowest level
    that it crosses; num_bytes: as CostModel.collective_s takes them; seconds: alone on the link.
    phases, pieces: what each of its pieces runs as instead (meshfold.ir.node_groups); seconds are those
    of all together."""

    kind: str
    axes: tuple[str, ...]
    link: str
    num_bytes: int
    seconds: float
    phases: tuple["Collective", ...] = ()
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class Event:
    """See the module docstring. inside_bytes: the most that is alive inside the instance while it
    lasts, made there and not yet freed. number: of open and reduce the bucket's, of start and wait
    their own, of give and take the part's.
    """

    action: Action
    seconds: float = 0.0
    inside_bytes: int = 0
    number: int = -1
    collective: Collective | None = None


@dataclass(frozen=True, slots=True)
class BucketEvents:
    """Parameters gathered, and gradients reduced, together. None: no such collective. whole_bytes:
    of what is made of the shards (gathered, or cast), flat_bytes: of the gradients while they are
    reduced, result_bytes: of what comes out. saved: the backward reads the gathered members.
    dtype: of the gradients, read_dtype: as ops read the parameters; empty where not known.
    is_alone: one parameter, never with others, whose gradient is what is reduced."""

    gather: Collective | None
    reduce: Collective | None
    whole_bytes: int
    flat_bytes: int
    result_bytes: int
    saved: bool
    dtype: str = ""
    read_dtype: str = ""
    is_alone: bool = False

    @property
    def reduces_gradient(self) -> bool:
        """Whether no buffer is made for the reduction: it reads the gradient itself."""
        return self.is_alone and self.dtype == self.read_dtype


@dataclass(frozen=True)
class RegionEvents:
    """One region whose values arrive in certain layouts. stays: what is gathered is kept from the
    forward to the backward (ZeRO 1 and 2). again: what the event of that name stands for."""

    name: str
    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    buckets: tuple[BucketEvents, ...] = ()
    stays: bool = False
    again: tuple[Event, ...] = ()

    def __post_init__(self) -> None:
        if any(event.action not in ("compute", "inline") for event in self.again):
            raise ValueError(f"region {self.name}: again has compute and collectives alone")
        for events in (self.forward, self.backward):
            in_flight: set[int] = set()
            for event in events:
                if event.action == "start":
                    in_flight.add(event.number)
                elif event.action == "wait" and event.number not in in_flight:
                    raise ValueError(f"region {self.name}: wait {event.number} has no start")
                elif event.action == "wait":
                    in_flight.remove(event.number)

    @property
    def makes(self) -> bool:
        """Whether parameters are gathered or cast for it."""
        return any(b.whole_bytes for b in self.buckets)


@dataclass(frozen=True, slots=True)
class MergedReduction:
    """Reductions that run as one, `collective`, which starts when the last of them would have
    (meshfold.ir.bucketing)."""

    places: tuple[Place, ...]
    collective: Collective


@dataclass(frozen=True, slots=True)
class MergedGather:
    """Gathers that run as one, `collective`, which starts where that of the first would; `again` is
    that of those that the backward reads again, None if there are none."""

    places: tuple[Place, ...]
    collective: Collective
    again: Collective | None = None


@dataclass(frozen=True)
class StepEvents:
    """A step in one pass. instances: numbers of `regions`, in order of execution. late: collectives
    behind all others (gradients of shards that other axes have summands of).

    held_bytes: beside what is inside an instance, gathered or in a bucket, at the moments of the
    forwards of all instances, then of their backwards, then of the optimizer. fixed_bytes: states,
    batch, reserve. The optimizer's own is in held_bytes. slowdown: of compute and collectives
    beside each other. merged, gathers: reductions and gathers in place of those of buckets.
    """

    regions: tuple[RegionEvents, ...]
    instances: tuple[int, ...]
    late: tuple[Collective, ...]
    optimizer_s: float
    held_bytes: tuple[int, ...]
    fixed_bytes: int
    slowdown: float = OVERLAP_SLOWDOWN
    merged: tuple[MergedReduction, ...] = ()
    gathers: tuple[MergedGather, ...] = ()

    def __post_init__(self) -> None:
        if any(not 0 <= r < len(self.regions) for r in self.instances):
            raise ValueError(f"instances: there are {len(self.regions)} regions")
        if len(self.held_bytes) != 2 * len(self.instances) + 1:
            raise ValueError(
                f"held_bytes: {len(self.instances)} instances have "
                f"{2 * len(self.instances) + 1} moments, not {len(self.held_bytes)}"
            )
        reduces, gathers = (m.places for m in self.merged), (m.places for m in self.gathers)
        for name, found in (("merged", reduces), ("gathers", gathers)):
            seen: set[Place] = set()
            for place in (place for places in found for place in places):
                if place in seen or not self._has(place, gathers=name == "gathers"):
                    raise ValueError(f"{name}: {place} is twice there, or no bucket that does this")
                seen.add(place)

    def _has(self, place: Place, *, gathers: bool) -> bool:
        """Whether there is such a bucket, and it gathers, or reduces."""
        instance, number = place
        if not 0 <= instance < len(self.instances):
            return False
        buckets = self.regions[self.instances[instance]].buckets
        if not 0 <= number < len(buckets):
            return False
        return (buckets[number].gather if gathers else buckets[number].reduce) is not None


@dataclass(frozen=True, slots=True)
class OverlapRow:
    """The collectives of one kind over the same axes, of a step: how many, and their seconds behind
    compute and in its way."""

    kind: str
    axes: tuple[str, ...]
    count: int
    hidden_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A simulated step: compute alone, what compute loses to collectives beside it, what it waits
    for them; step_s is their sum. peak_s: when memory is at its peak, from the start of the step.
    """

    compute_s: float
    contention_s: float
    exposed_s: float
    overlap: tuple[OverlapRow, ...]
    peak_bytes: int
    peak_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.contention_s + self.exposed_s

    @property
    def hidden_share(self) -> float:
        """Of the seconds of all collectives; 1 where there are none."""
        hidden_s = sum(row.hidden_s for row in self.overlap)
        total_s = hidden_s + sum(row.exposed_s for row in self.overlap)
        return hidden_s / total_s if total_s else 1.0


_AS, _TIMES, _THEN = " = ", " x ", " + "


def write_collective(c: Collective) -> str:
    """One line; of two pieces in phases `all_reduce ... = 2 x reduce_scatter ... + all_reduce ... +
    all_gather ...`."""
    whole = f"{c.kind} {','.join(c.axes)} {c.link} {c.num_bytes} {c.seconds!r}"
    if not c.phases:
        return whole
    return f"{whole}{_AS}{c.pieces}{_TIMES}{_THEN.join(map(write_collective, c.phases))}"


def read_collective(text: str) -> Collective:
    """Inverse of write_collective. Raises ValueError."""
    whole, is_phased, phases = text.partition(_AS)
    found = _read_whole(whole)
    if not is_phased:
        return found
    pieces, _, phases = phases.partition(_TIMES)
    parts = phases.split(_THEN)
    if found.kind != "all_reduce" or len(parts) != PHASES or not pieces.isdigit() or pieces == "0":
        raise ValueError(
            f"{text!r}: write 'all_reduce ... = PIECES x' and {PHASES} phases, joined by +"
        )
    return replace(found, phases=tuple(map(_read_whole, parts)), pieces=int(pieces))


def _read_whole(text: str) -> Collective:
    words = text.split(" ")
    if len(words) < 5:
        raise ValueError(f"{text!r} is no collective; write 'kind axes link bytes seconds'")
    kind, axes, *link, num_bytes, seconds = words
    found = Collective(kind, tuple(axes.split(",")), " ".join(link), int(num_bytes), float(seconds))
    if found.seconds < 0 or found.num_bytes < 0:
        raise ValueError(f"{text!r}: bytes and seconds are 0 or more")
    return found


def write_event(event: Event) -> str:
    """One line of a plan file."""
    if event.collective is not None:
        start = f"start {event.number} " if event.action == "start" else ""
        what = start + write_collective(event.collective)
    elif event.action == "compute":
        what = f"compute {event.seconds!r}"
    else:
        what = event.action + (f" {event.number}" if event.action in _NUMBERED_ACTIONS else "")
    return f"{what} {event.inside_bytes}"


def read_event(line: str) -> Event:
    """Inverse of write_event. Raises ValueError."""
    what, _, inside = line.rpartition(" ")
    if not what or not inside.isdigit():
        raise ValueError(f"{line!r} is no event; its last word is a number of bytes")
    first, _, rest = what.partition(" ")
    if first == "compute":
        seconds = float(rest)
        if not seconds >= 0:
            raise ValueError(f"{line!r}: seconds are 0 or more")
        return Event("compute", seconds, int(inside))
    if first == "start":
        number, _, text = rest.partition(" ")
        if not number.isdigit():
            raise ValueError(f"{line!r}: a start has a number and a collective")
        return Event("start", 0.0, int(inside), int(number), read_collective(text))
    if first not in get_args(Action):
        return Event("inline", inside_bytes=int(inside), collective=read_collective(what))
    action: Action = first  # type: ignore[assignment]  # is one of them
    if action in _BARE_ACTIONS and not rest:
        return Event(action, inside_bytes=int(inside))
    if action in _NUMBERED_ACTIONS and rest.isdigit():
        return Event(action, inside_bytes=int(inside), number=int(rest))
    raise ValueError(
        f"{line!r} is no event; {', '.join(_NUMBERED_ACTIONS)} have a number, "
        f"{', '.join(_BARE_ACTIONS)} none"
    )


def run_lengths(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(number, how often in a row)."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][0] == number:
            found[-1] = number, found[-1][1] + 1
        else:
            found.append((number, 1))
    return tuple(found)


def from_run_lengths(runs: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Inverse of run_lengths."""
    return tuple(number for number, count in runs for _ in range(count))
