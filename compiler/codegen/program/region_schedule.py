"""The order in which a rank runs the segments of a region, forward and backward.

    forward   O b   unshard     wait for group b, whose parameters are then unsharded
              F k   forward     run segment k: ops, a collective's start, or its wait
              G     prefetch    start the gathers of the next region that gathers
              T     epilogue    the next action of the epilogue of the region before, if one is left
    backward  A     enter       wait for the region's own gathers, release what later regions have
              B k   backward    of segment k; of a wait it starts the dual collective, of a start it
                                waits for it
              W k   weights     the gradients of weights that the backward of segment k deferred
              R b   reduce      start the reduction of group b
              G     prefetch    start the gathers of the region before
              T     epilogue    the next action of the epilogue of the region behind, if one is left

Between chained regions (meshfold.codegen.chained_chunks) the last actions of a
direction, its epilogue, run within the next region; segments that split or join chunks do not run
between them.

The backward of a segment computes what the collectives before it wait for; products that make
gradients of weights are deferred, and fill the time while collectives are in flight. The order is
found by meshfold.passes.schedule.list_schedule with the cost model's seconds, which are the same on
all ranks. As text, segment 3 is `>3` where it starts a collective and `<3` where it waits.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Literal

from torch import fx

from meshfold.ir.conversion_step import Step
from meshfold.ops.expert_dispatch import Route
from meshfold.sharding.async_autograd import Actions

Origin = int | tuple[int, Step]
"""What a node is part of: fx.Node.meta[ORIGIN]."""


@dataclass(frozen=True)
class OpsSegment:
    """Ops that run without a break."""

    inputs: tuple[str, ...]
    """Names of values of the region; the first is the mesh."""
    outputs: tuple[str, ...]
    graph: fx.GraphModule
    """Takes the inputs in order and returns the outputs as a tuple."""
    origins: tuple[Origin, ...]
    """The ops and conversion steps that its nodes belong to, in order."""
    kind: Literal["ops"] = "ops"


@dataclass(frozen=True)
class CollectiveSegment:
    """The start or the wait of a conversion, or of rows that are dispatched to their experts. What
    is in flight between the two has the start's name, forward and backward."""

    kind: Literal["start", "wait"]
    inputs: tuple[str, ...]
    """One name; of a start whose actions depend on a route also that of the route."""
    outputs: tuple[str]
    axis: str
    actions: Actions | Callable[[Route], Actions]
    origin: Origin
    """The conversion step, or the op."""
    partner: int = -1
    """The number of a wait's start, else -1."""

    def actions_on(self, *route: Route) -> Actions:
        """Both directions, given what was read beside the value that is sent."""
        return self.actions(*route) if callable(self.actions) else self.actions


RegionSegment = OpsSegment | CollectiveSegment


@dataclass(frozen=True)
class SegmentedGraph:
    """A region's graph in segments, in an order in which they can run."""

    segments: tuple[RegionSegment, ...]
    members: Mapping[str, tuple[int, int]]
    """(group, member) of the parameters that come out of groups, by name."""
    results: tuple[str, ...]
    """Names of what the region returns."""
    placeholders: tuple[str, ...]

    @cached_property
    def owners(self) -> Mapping[Origin, OpsSegment]:
        """The segment in which an op ends."""
        return {o: p for p in self.segments if p.kind == "ops" for o in p.origins}

    @cached_property
    def makers(self) -> Mapping[str, int]:
        """Number of the segment that computes a value, by name."""
        return {name: k for k, segment in enumerate(self.segments) for name in segment.outputs}


class ActionKind(Enum):
    """See the module docstring. The value is how it is written."""

    UNSHARD = "O"
    FORWARD = "F"
    PREFETCH = "G"
    EPILOGUE = "T"
    ENTER = "A"
    BACKWARD = "B"
    WEIGHTS = "W"
    REDUCE = "R"


@dataclass(frozen=True, slots=True)
class RegionAction:
    """One entry of a schedule. number: of a segment or parameter group, -1 where there is none."""

    kind: ActionKind
    number: int = -1


@dataclass(frozen=True)
class RegionSchedule:
    """How a region runs in mode scheduled."""

    graph: SegmentedGraph
    deferred_s: Mapping[int, float]
    """Seconds of deferred gradients of weights, by number of the segment."""
    deferred_bytes: Mapping[int, Mapping[int, int]]
    """How much more is held until these run, by number of the segment, then of the product."""
    forward: tuple[RegionAction, ...]
    backward: tuple[RegionAction, ...]
    splits: Mapping[int, int] = field(default_factory=dict)
    """The segment that splits a slot into chunks, by number of the slot."""
    joins: Mapping[int, int] = field(default_factory=dict)
    """The segment that joins an output from chunks, by number of the output."""
    chained: Mapping[int, int] = field(default_factory=dict)
    """Slots that come in chunks from an equal region before, and which of its outputs each is. Only
    then the last actions of a direction, its epilogue, may be left to the next region."""
    forward_epilogue: int = 0
    """How many actions of the forward are its epilogue; the same for the backward."""
    backward_epilogue: int = 0

    def forward_end(self, sent: Collection[int]) -> int:
        """How many actions run before the next region begins, which reads these outputs in
        chunks."""
        is_left = bool(self.chained) and set(self.chained.values()).issubset(sent)
        return len(self.forward) - (self.forward_epilogue if is_left else 0)

    def backward_end(self, received: Collection[int]) -> int:
        """The same backward, where these slots have come in chunks."""
        is_left = bool(self.chained) and set(self.chained).issubset(received)
        return len(self.backward) - (self.backward_epilogue if is_left else 0)

    @cached_property
    def last_readers(self) -> Mapping[str, int]:
        """The last action of the backward that adds to the gradient of a value, by name."""
        last: dict[str, int] = {}
        for k, action in enumerate(self.backward):
            if action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHTS):
                last |= dict.fromkeys(self.graph.segments[action.number].inputs, k)
        return last

    @cached_property
    def dead(self) -> tuple[tuple[str, ...], ...]:
        """The values that nobody reads after an action of the forward, for each."""
        last: dict[str, int] = {}
        for k, action in enumerate(self.forward):
            if action.kind == ActionKind.UNSHARD:
                members = self.graph.members.items()
                last |= {name: k for name, (b, _) in members if b == action.number}
            elif action.kind == ActionKind.FORWARD:
                segment = self.graph.segments[action.number]
                last |= dict.fromkeys((*segment.inputs, *segment.outputs), k)
        dead: list[list[str]] = [[] for _ in self.forward]
        for name, k in last.items():
            if name not in self.graph.results:
                dead[k].append(name)
        return tuple(map(tuple, dead))

    def text_lines(self) -> list[str]:
        """Both orders as text, with a bar before the epilogue."""
        return [
            f"{name}: {' '.join(self._words(actions, epilogue))}"
            for name, actions, epilogue in (
                ("forward", self.forward, self.forward_epilogue),
                ("backward", self.backward, self.backward_epilogue),
            )
        ]

    def _words(self, actions: tuple[RegionAction, ...], epilogue: int) -> list[str]:
        words = list(map(self._word, actions))
        return [*words[:-epilogue], "|", *words[-epilogue:]] if epilogue else words

    def _word(self, action: RegionAction) -> str:
        if action.number < 0:
            return action.kind.value
        is_forward = action.kind == ActionKind.FORWARD
        runs_segment = is_forward or action.kind == ActionKind.BACKWARD
        kind = self.graph.segments[action.number].kind if runs_segment else "ops"
        if kind == "ops":
            return f"{action.kind.value}{action.number}"
        return f"{'>' if (kind == 'start') == is_forward else '<'}{action.number}"


@dataclass(frozen=True)
class ChunkedBoundary:
    """Values that an instance receives and sends in chunks, so that no segment splits or
    joins them."""

    received: tuple[tuple[int, int], ...] = ()
    """(slot, output of the instance before), by output."""
    sent: tuple[int, ...] = ()
    """Its own outputs, ascending."""

    @property
    def is_crossed(self) -> bool:
        return bool(self.received or self.sent)

    @property
    def slots(self) -> frozenset[int]:
        return frozenset(slot for slot, _ in self.received)

    def idle(self, schedule: RegionSchedule) -> frozenset[int]:
        """Segments that do not run, as nothing is split or joined."""
        splits = (schedule.splits[slot] for slot in self.slots)
        return frozenset((*splits, *(schedule.joins[n] for n in self.sent)))

    def received_names(self, schedule: RegionSchedule) -> tuple[str, ...]:
        """The chunks that come, by number."""
        segments = (schedule.graph.segments[schedule.splits[slot]] for slot, _ in self.received)
        return tuple(name for segment in segments for name in segment.outputs)

    def sent_names(self, schedule: RegionSchedule) -> tuple[str, ...]:
        """The chunks that leave, by number: as the next instance counts them."""
        segments = (schedule.graph.segments[schedule.joins[n]] for n in self.sent)
        return tuple(name for segment in segments for name in segment.inputs[1:])
