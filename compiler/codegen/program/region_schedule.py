"""The order in which a rank runs the pieces of a region, forward and backward.

    forward   O b   wait for bucket b, its parameters are whole
              F p   run piece p: ops, a collective's start, or its wait
              G     start the gathers of the next region that gathers
              T     the next move of the tail of the region before, if one is left
    backward  A     own gathers are waited for, what later regions hold is let go
              B p   the backward of piece p; of a wait it starts the dual collective, of a start it
                    waits for it
              W p   gradients of the weights of piece p, which its B left
              R b   start the reduction of bucket b
              G     start the gathers of the region before
              T     the next move of the tail of the region behind, if one is left

Between regions in line (passes/line_schedule.py) the last moves of one direction, its tail, run
within the next region; what takes parts apart or joins them does not run between them
(meshfold.handed_parts).

Of the ops of a piece, its B makes what the collectives before it wait for; products that make
gradients of weights are W, and fill the time while collectives are on their way. Found by
passes/list_schedule.py with the cost model's seconds, which are the same on all ranks. Piece 3 is
`>3` where it starts a collective and `<3` where it waits.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from torch import fx

from meshfold.ops.async_autograd import Actions
from meshfold.ops.expert_dispatch import Route
from meshfold.passes.price.conversions import Step

Origin = int | tuple[int, Step]
"""As fx.Node.meta[ORIGIN]."""


@dataclass(frozen=True)
class Piece:
    """Ops. inputs, outputs: names of values of the region. graph: takes the inputs in order, the
    first of them the mesh, and returns the outputs as a tuple. origins: what its nodes are part
    of, in order."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    graph: fx.GraphModule
    origins: tuple[Origin, ...]
    kind: Literal["ops"] = "ops"


@dataclass(frozen=True)
class Collective:
    """The start or the wait of a conversion on `axis`, or of rows that travel to their experts.
    inputs, outputs: one name each, as of a Piece; between them what is in flight has the start's
    name, forward and backward. A start whose actions depend on a route reads it as well, as its
    second input. origin: the conversion, or the op; partner: of a wait the number of its start,
    else -1."""

    kind: Literal["start", "wait"]
    inputs: tuple[str, ...]
    outputs: tuple[str]
    axis: str
    actions: Actions | Callable[[Route], Actions]
    origin: Origin
    partner: int = -1

    def actions_on(self, *route: Route) -> Actions:
        """Both directions, of what was read beside the value that is sent."""
        return self.actions(*route) if callable(self.actions) else self.actions


@dataclass(frozen=True)
class Pieces:
    """A region's graph in pieces, in an order in which they can run. members: (bucket, member) of
    the parameters that come out of buckets, by name; results: names of what the region returns;
    placeholders: of its graph."""

    pieces: tuple[Piece | Collective, ...]
    members: Mapping[str, tuple[int, int]]
    results: tuple[str, ...]
    placeholders: tuple[str, ...]

    @cached_property
    def owners(self) -> Mapping[Origin, Piece]:
        """The piece in which an op ends."""
        return {o: p for p in self.pieces if p.kind == "ops" for o in p.origins}

    def makers(self) -> dict[str, int]:
        """Number of the piece that makes a value, by name."""
        return {name: k for k, piece in enumerate(self.pieces) for name in piece.outputs}


MoveKind = Literal["O", "F", "G", "T", "A", "B", "W", "R"]


@dataclass(frozen=True, slots=True)
class Move:
    """See the module docstring. number: of a piece or bucket, -1 for G, T and A."""

    kind: MoveKind
    number: int = -1


@dataclass(frozen=True)
class RegionSchedule:
    """How a region is run in `scheduled` mode. late_s, held_bytes: by number of the pieces with a
    W, its seconds, and what is held for it. taken, handed: the pieces that take a slot apart, and
    that join an output, by number of these. line: of those, slots and the outputs that they are
    between equal regions in line; then the last moves of a direction, as many as its tail has, may
    be left to the next region.
    """

    pieces: Pieces
    late_s: Mapping[int, float]
    held_bytes: Mapping[int, int]
    forward: tuple[Move, ...]
    backward: tuple[Move, ...]
    taken: Mapping[int, int] = field(default_factory=dict)
    handed: Mapping[int, int] = field(default_factory=dict)
    line: Mapping[int, int] = field(default_factory=dict)
    forward_tail: int = 0
    backward_tail: int = 0

    def forward_end(self, parts_out: Collection[int]) -> int:
        """How many moves run before the next region begins, which takes these outputs in parts."""
        is_left = bool(self.line) and set(self.line.values()).issubset(parts_out)
        return len(self.forward) - (self.forward_tail if is_left else 0)

    def backward_end(self, parts_in: Collection[int]) -> int:
        """The same backward, where these slots have come in parts."""
        is_left = bool(self.line) and set(self.line).issubset(parts_in)
        return len(self.backward) - (self.backward_tail if is_left else 0)

    @cached_property
    def last_readers(self) -> Mapping[str, int]:
        """By name of a value the last move of the backward that adds to its gradient."""
        last: dict[str, int] = {}
        for k, move in enumerate(self.backward):
            if move.kind in "BW":
                last |= dict.fromkeys(self.pieces.pieces[move.number].inputs, k)
        return last

    @cached_property
    def dead(self) -> tuple[tuple[str, ...], ...]:
        """Per move of the forward the values that nobody reads after it."""
        last: dict[str, int] = {}
        for k, move in enumerate(self.forward):
            if move.kind == "O":
                members = self.pieces.members.items()
                last |= {name: k for name, (b, _) in members if b == move.number}
            elif move.kind == "F":
                piece = self.pieces.pieces[move.number]
                last |= dict.fromkeys((*piece.inputs, *piece.outputs), k)
        dead: list[list[str]] = [[] for _ in self.forward]
        for name, k in last.items():
            if name not in self.pieces.results:
                dead[k].append(name)
        return tuple(map(tuple, dead))

    def lines(self) -> list[str]:
        """Both orders as text."""
        return [
            f"{name}: {' '.join(self._words(moves, tail))}"
            for name, moves, tail in (
                ("forward", self.forward, self.forward_tail),
                ("backward", self.backward, self.backward_tail),
            )
        ]

    def _words(self, moves: tuple[Move, ...], tail: int) -> list[str]:
        """A bar before the tail."""
        words = list(map(self._word, moves))
        return [*words[:-tail], "|", *words[-tail:]] if tail else words

    def _word(self, move: Move) -> str:
        if move.number < 0:
            return move.kind
        kind = self.pieces.pieces[move.number].kind if move.kind in "FB" else "ops"
        if kind == "ops":
            return f"{move.kind}{move.number}"
        starts = (kind == "start") == (move.kind == "F")
        return f"{'>' if starts else '<'}{move.number}"
