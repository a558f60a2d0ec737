"""The events of a scheduled program (meshfold.step_events), for the simulator.

Of the events of the same plan in eager mode stay the buckets, what is held between instances, and
the optimizer. Inside a region kernels and collectives are taken to run at the worst moment of their
direction, with what is held for gradients of weights on top: the simulated peak is a bound from
above. Buckets are opened and reduced beside what eager mode has alive then.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from meshfold.cost_models.step_simulation import simulate
from meshfold.opgraph import FoldedGraph
from meshfold.passes.variants import planned_graph
from meshfold.piece_prices import PiecePrices
from meshfold.pipeline_program import emit_plan
from meshfold.plan import Plan
from meshfold.program import EmittedProgram, RegionProgram
from meshfold.region_schedule import RegionSchedule
from meshfold.schedule_program import region_prices
from meshfold.step_events import Event, RegionEvents, StepEvents

_SAME = {"arrive": "settle"}
"""What stands for an event of eager mode in a schedule."""


def with_schedule(plan: Plan, folded: FoldedGraph) -> Plan:
    """`plan` with the events and the simulated step of its schedule, if it has one. folded: the
    captured model."""
    if plan.mode != "scheduled" or plan.events is None:
        return plan
    program = emit_plan(folded, plan)
    assert isinstance(program, EmittedProgram), "only a step in one pass has events"
    prices = region_prices(program, planned_graph(folded, plan), plan)
    events = scheduled_events(plan.events, program, list(prices))
    return replace(plan, events=events, simulated=simulate(events).step)


def scheduled_events(
    events: StepEvents, program: EmittedProgram, prices: list[PiecePrices]
) -> StepEvents:
    """`events`, of the eager program, in the order of the schedules. prices: per region."""
    regions = zip(events.regions, program.regions, prices, strict=True)
    return replace(events, regions=tuple(_Writer(*region).write() for region in regions))


class _Writer:
    def __init__(self, events: RegionEvents, region: RegionProgram, prices: PiecePrices) -> None:
        assert region.schedule is not None and events.name == region.name
        self.events = events
        self.region = region
        self.schedule: RegionSchedule = region.schedule
        self.prices = prices
        self.held: dict[int, int] = {}
        """Bytes held for W's whose B has run, but for the last one: these are alive in eager mode
        as well."""
        self.last_held: dict[int, int] = {}

    def write(self) -> RegionEvents:
        forward = tuple(_placed(self._forward(), self.events.forward))
        return replace(self.events, forward=forward, backward=tuple(self._backward()))

    def _forward(self) -> Iterator[Event]:
        for move in self.schedule.forward:
            match move.kind:
                case "O":
                    yield from _compute(self.prices.cast_s(self.region.buckets[move.number]))
                    yield Event("open", bucket=move.number)
                case "G":
                    yield Event("ahead")
                case "F":
                    yield from self._piece(move.number, 0)

    def _backward(self) -> Iterator[Event]:
        yield from _placed(self._arrival(), self.events.backward)
        for move in self.schedule.backward:
            for event in _placed(self._move(move.kind, move.number), self.events.backward):
                held = sum(self.held.values())
                yield replace(event, inside_bytes=event.inside_bytes + held)

    def _arrival(self) -> Iterator[Event]:
        pairs = zip(self.region.buckets, self.events.buckets, strict=True)
        yield from _compute(sum(self.prices.cast_s(b) for b, known in pairs if known.saved))
        yield Event("settle")
        if self.events.again:
            yield Event("again")

    def _move(self, kind: str, number: int) -> Iterator[Event]:
        match kind:
            case "B":
                self.held |= self.last_held
                self.last_held = {}
                yield from self._piece(number, 1)
                if number in self.schedule.held_bytes:
                    self.last_held = {number: self.schedule.held_bytes[number]}
            case "W":
                yield from _compute(self.schedule.late_s[number])
                for held in (self.held, self.last_held):
                    held.pop(number, None)
            case "R":
                yield Event("reduce", bucket=number)
            case "G":
                yield Event("before")

    def _piece(self, number: int, direction: int) -> Iterator[Event]:
        pieces = self.schedule.pieces
        piece = pieces.pieces[number]
        if piece.kind == "ops":
            left_s = self.schedule.late_s.get(number, 0.0) if direction else 0.0
            for seconds, transfer in self.prices.works(pieces, piece, direction):
                if transfer is not None:
                    yield Event("inline", collective=transfer)
                # The products whose gradients of weights are made in W.
                now_s = min(left_s, seconds)
                left_s -= now_s
                yield from _compute(seconds - now_s)
            return
        seconds, transfer = self.prices.conversion(piece, direction)
        start = number if piece.kind == "start" else piece.partner
        if (piece.kind == "start") == (direction == 0):
            yield from _compute(seconds)
            if transfer is not None:
                yield Event("start", bucket=start, collective=transfer)
        elif transfer is not None:
            yield Event("wait", bucket=start)


def _placed(events: Iterable[Event], eager: Sequence[Event]) -> Iterator[Event]:
    """The events beside what is alive inside in eager mode."""
    worst = max((e.inside_bytes for e in eager), default=0)
    known = {(_SAME.get(e.action, e.action), e.bucket): e.inside_bytes for e in eager}
    for event in events:
        is_known = event.action in ("open", "ahead", "settle", "reduce")
        inside = known.get((event.action, event.bucket), worst) if is_known else worst
        yield replace(event, inside_bytes=inside)


def _compute(seconds: float) -> Iterator[Event]:
    if seconds > 0:
        yield Event("compute", seconds)
