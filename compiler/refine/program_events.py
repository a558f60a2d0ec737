"""The events of a program that passes have changed (meshfold.ir.step_events), for the simulator.

Regions with products in a ring have the events of what they are written as. Of a region with a
schedule the buckets stay, what is held between instances, and the optimizer. An op has alive
inside its region what it has in the order of the graph, with what is held for gradients of weights
on top.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from meshfold.codegen.emit.pass_pipeline import emit
from meshfold.codegen.program.emitted import RegionProgram
from meshfold.codegen.program.region_schedule import RegionSchedule
from meshfold.codegen.schedule.segment_costs import PiecePrices
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.cost_models.simulation.step import simulate
from meshfold.handed_parts import Borders, borders_of
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.plan import Plan
from meshfold.ir.step_events import Event, RegionEvents
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.chained_chunks.software_pipeline import LineOrders
from meshfold.passes.events.bucketing import merged_events, sizes_of
from meshfold.passes.events.region import bytes_inside, merged, region_events
from meshfold.passes.memory.local_program import Probe
from meshfold.passes.price.conversions import Step
from meshfold.passes.price.region import RegionPricer
from meshfold.schedule_program import region_prices

Inside = Mapping[int | tuple[int, Step], tuple[int, int]]


def with_program_events(
    plan: Plan,
    folded: FoldedGraph,
    costs: CostModel | None = None,
    probe: Probe | None = None,
    known: LineOrders | None = None,
) -> Plan:
    """`plan` with the events and the simulated step of the program that it is emitted as, where
    these are others than those it was searched with. folded: the captured model; costs: of the
    plan's cluster and mesh, and probe, if at hand; known: as for emit."""
    has_ring = any(region.ring for region in plan.regions)
    if plan.events is None or not (plan.mode == "scheduled" or has_ring):
        return plan
    costs = costs or CostModel(plan.cluster, plan.mesh)
    probe = probe or OpProber()
    program = emit(folded, plan, costs=costs, known=known)
    written: list[RegionEvents] = []
    instances = [0] * len(program.programs)
    borders_by_instance = borders_of(program)
    for number, price in enumerate(region_prices(program, costs)):
        region = program.regions[number]
        like = [k for k, p in enumerate(program.programs) if p == number]
        events = plan.events.regions[plan.events.instances[like[0]]]
        floats = next(i.floats for i in program.folded.instances if i.region == region.region)
        if plan.regions[region.region].ring:
            pricer = RegionPricer(region.ops, region.typing, price.rules, plan.mesh, costs)
            arguments = events.name, region.typing, region.slots, pricer, probe, floats
            events = region_events(*arguments).events
        at: dict[Borders, int] = {}
        for k in like:
            borders = borders_by_instance[k]
            if borders not in at:
                at[borders] = len(written)
                written.append(events)
            instances[k] = at[borders]
        if region.schedule is not None:
            inside = bytes_inside(region.typing, region.slots, price.ops, costs, probe, floats)
            for borders, place in at.items():
                written[place] = _Writer(events, region, price, inside, borders).write()
    found = replace(plan.events, regions=tuple(written), instances=tuple(instances))
    step = merged_events(found, sizes_of(plan), costs)
    return replace(plan, events=step, simulated=simulate(step).step)


class _Writer:
    """inside: bytes alive by op or step of a conversion, as passes.region_events.bytes_inside."""

    def __init__(
        self,
        events: RegionEvents,
        region: RegionProgram,
        prices: PiecePrices,
        inside: Inside,
        borders: Borders,
    ) -> None:
        assert region.schedule is not None and events.name == region.name
        self.events = events
        self.region = region
        self.schedule: RegionSchedule = region.schedule
        self.prices = prices
        self.inside = inside
        self.borders = borders
        self.taken = borders.taken_names(self.schedule)
        self.handed = borders.handed_names(self.schedule)
        self.idle = borders.idle(self.schedule)
        self.held: dict[int, int] = {}
        """Bytes held for W's whose B has run, but for the last one: these are alive in eager mode
        as well."""
        self.last_held: dict[int, int] = {}

    def write(self) -> RegionEvents:
        forward = tuple(merged(self._forward()))
        return replace(self.events, forward=forward, backward=tuple(merged(self._backward())))

    def _forward(self) -> Iterator[Event]:
        known = {(e.action, e.number): e.inside_bytes for e in self.events.forward}
        end = self.schedule.forward_end(self.borders.handed)
        read: set[str] = set()
        for k, move in enumerate(self.schedule.forward):
            if k >= end:
                yield Event("leave")
            match move.kind:
                case "T":
                    yield Event("next")
                case "O":
                    inside = known["open", move.number]
                    copies = self.prices.copies(self.region.buckets[move.number])
                    yield Event("compute", copies.packed_s, inside)
                    yield Event("open", inside_bytes=inside, number=move.number)
                    yield Event("compute", copies.taken_s, inside)
                case "G":
                    yield Event("ahead", inside_bytes=known["ahead", -1])
                case "F" if move.number not in self.idle:
                    piece = self.schedule.pieces.pieces[move.number]
                    new = [name for name in piece.inputs if name in self.taken and name not in read]
                    read |= set(new)
                    yield from (Event("take", number=self.taken.index(name)) for name in new)
                    yield from self._piece(move.number, 0)
                    given = [name for name in piece.outputs if name in self.handed]
                    yield from (Event("give", number=self.handed.index(name)) for name in given)

    def _backward(self) -> Iterator[Event]:
        before = self.events.backward[0].inside_bytes if self.events.backward else 0
        pairs = zip(self.region.buckets, self.events.buckets, strict=True)
        saved = [self.prices.copies(b) for b, known in pairs if known.saved]
        now = before
        yield Event("compute", sum(c.packed_s for c in saved), before)
        yield Event("settle", inside_bytes=before)
        yield Event("compute", sum(c.taken_s for c in saved), before)
        if self.events.again:
            now = self.events.again[0].inside_bytes
            yield Event("again", inside_bytes=now)
        end = self.schedule.backward_end(self.borders.slots)
        last = [self.schedule.last_readers.get(name, 0) for name in self.taken]
        for k, move in enumerate(self.schedule.backward):
            if k >= end:
                yield Event("leave")
            for event in self._move(move.kind, move.number):
                # Starts for other regions, and W's, stand where the last piece was.
                now = event.inside_bytes or now
                yield replace(event, inside_bytes=now + sum(self.held.values()))
            yield from (Event("give", number=p) for p, at in enumerate(last) if at == k)

    def _move(self, kind: str, number: int) -> Iterator[Event]:
        match kind:
            case "T":
                yield Event("next")
            case "B" if number not in self.idle:
                made = self.schedule.pieces.pieces[number].outputs
                for name in (name for name in made if name in self.handed):
                    yield Event("take", number=self.handed.index(name))
                if self.schedule.pieces.pieces[number].kind == "ops":
                    self.held |= self.last_held
                    self.last_held = {}
                yield from self._piece(number, 1)
                if number in self.schedule.held_bytes:
                    self.last_held = {number: self.schedule.held_bytes[number]}
            case "W":
                yield Event("compute", self.schedule.late_s[number])
                for held in (self.held, self.last_held):
                    held.pop(number, None)
            case "R":
                yield Event("compute", self.prices.copies(self.region.buckets[number]).reduced_s)
                yield Event("reduce", number=number)
            case "G":
                yield Event("before")

    def _piece(self, number: int, direction: int) -> Iterator[Event]:
        pieces = self.schedule.pieces
        piece = pieces.pieces[number]
        if piece.kind == "ops":
            left_s = self.schedule.late_s.get(number, 0.0) if direction else 0.0
            for seconds, transfer, origin in self.prices.works(pieces, piece, direction):
                inside = self.inside[origin][direction]
                if transfer is not None:
                    yield Event("inline", inside_bytes=inside, collective=transfer)
                # The products whose gradients of weights are made in W.
                now_s = min(left_s, seconds)
                left_s -= now_s
                yield Event("compute", seconds - now_s, inside)
            return
        seconds, transfer, origin = self.prices.conversion(piece, direction)
        inside = self.inside[origin][direction]
        start = number if piece.kind == "start" else piece.partner
        if (piece.kind == "start") == (direction == 0):
            yield Event("compute", seconds, inside)
            if transfer is not None:
                yield Event("start", inside_bytes=inside, number=start, collective=transfer)
        elif transfer is not None:
            yield Event("wait", inside_bytes=inside, number=start)
            yield Event("compute", seconds, inside)
