"""The events of a program that passes have changed (meshfold.ir.step_events), for the simulator.

Regions with collective matmuls have the events of what they are written as. A region with a
schedule retains its parameter groups, what is resident between instances, and the optimizer. An op
has alive inside its region what it has in the order of the graph, and what is saved for deferred
gradients of weights.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from meshfold.codegen.emit.memo import EmissionMemo
from meshfold.codegen.emit.pass_pipeline import emit
from meshfold.codegen.program.emitted import RegionProgram
from meshfold.codegen.program.region_schedule import (
    ActionKind,
    ChunkedBoundary,
    OpsSegment,
    RegionSchedule,
)
from meshfold.codegen.schedule.list_scheduling import costs_of_regions
from meshfold.codegen.schedule.segment_costs import SegmentCosts
from meshfold.ir.conversion_step import Step
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.plan import Plan
from meshfold.ir.step_events import Event, RegionEvents
from meshfold.passes.events.bucketing import bucketed_events, sizes_of, with_events
from meshfold.passes.events.region import bytes_inside, coalesced, region_events
from meshfold.passes.memory.region import MemoryModel
from meshfold.passes.price.region import RegionPricer

Inside = Mapping[int | tuple[int, Step], tuple[int, int]]


def with_program_events(
    plan: Plan,
    folded: FoldedGraph,
    memo: EmissionMemo | None = None,
) -> Plan:
    """`plan` with the events and the simulated step of the program that it is emitted as, where
    these are others than those it was searched with. folded: the captured model; memo: as for
    emit."""
    has_matmuls = any(region.collective_matmul for region in plan.regions)
    if plan.events is None or not (plan.mode == "scheduled" or has_matmuls):
        return plan
    memo = memo or EmissionMemo(folded, plan)
    costs, model = memo.costs, MemoryModel(memo.costs, memo.probe)
    program = emit(folded, plan, memo=memo)
    written: list[RegionEvents] = []
    instances = [0] * len(program.programs)
    for number, price in enumerate(costs_of_regions(program, costs, memo.segments)):
        region = program.regions[number]
        like = [k for k, p in enumerate(program.programs) if p == number]
        events = plan.events.regions[plan.events.instances[like[0]]]
        floats = program.folded.first_floats[region.region]
        if plan.regions[region.region].collective_matmul:
            pricer = RegionPricer(region.ops, region.typing, price.rules, costs)
            arguments = events.name, region.typing, region.slots, pricer, model, floats
            events = region_events(*arguments).events
        at: dict[ChunkedBoundary, int] = {}
        for k in like:
            boundary = program.boundary_of(k)
            if boundary not in at:
                at[boundary] = len(written)
                written.append(events)
            instances[k] = at[boundary]
        if region.schedule is not None:
            inside = bytes_inside(region.typing, region.slots, price.ops, model, floats)
            for boundary, place in at.items():
                written[place] = _Writer(events, region, price, inside, boundary).write()
    found = replace(plan.events, regions=tuple(written), instances=tuple(instances))
    return with_events(plan, bucketed_events(found, sizes_of(plan), costs))


class _Writer:
    """inside: bytes alive by op or step of a conversion, as passes.events.region.bytes_inside."""

    def __init__(
        self,
        events: RegionEvents,
        region: RegionProgram,
        prices: SegmentCosts,
        inside: Inside,
        boundary: ChunkedBoundary,
    ) -> None:
        assert region.schedule is not None and events.name == region.name
        self.events = events
        self.region = region
        self.schedule: RegionSchedule = region.schedule
        self.prices = prices
        self.inside = inside
        self.boundary = boundary
        self.received = boundary.received_names(self.schedule)
        self.sent = boundary.sent_names(self.schedule)
        self.idle = boundary.idle(self.schedule)
        self.saved: dict[int, int] = {}
        """Bytes saved for deferred gradients of products whose backward has run, by segment, but
        for the last one: its bytes are alive in eager mode as well, until another op runs."""
        self.last_saved: dict[int, int] = {}

    def write(self) -> RegionEvents:
        forward = tuple(coalesced(self._forward()))
        return replace(self.events, forward=forward, backward=tuple(coalesced(self._backward())))

    def _forward(self) -> Iterator[Event]:
        known = {(e.kind, e.number): e.inside_bytes for e in self.events.forward}
        end = self.schedule.forward_end(self.boundary.sent)
        read: set[str] = set()
        for k, action in enumerate(self.schedule.forward):
            if k >= end:
                yield Event("epilogue")
            match action.kind:
                case ActionKind.EPILOGUE:
                    yield Event("run_epilogue")
                case ActionKind.UNSHARD:
                    inside = known["unshard", action.number]
                    copies = self.prices.copies(self.region.groups[action.number])
                    yield Event("compute", copies.packed_s, inside)
                    yield Event("unshard", inside_bytes=inside, number=action.number)
                    yield Event("compute", copies.unpacked_s, inside)
                case ActionKind.PREFETCH:
                    yield Event("forward_prefetch", inside_bytes=known["forward_prefetch", -1])
                case ActionKind.FORWARD if action.number not in self.idle:
                    segment = self.schedule.graph.segments[action.number]
                    new = [
                        name
                        for name in segment.inputs
                        if name in self.received and name not in read
                    ]
                    read |= set(new)
                    yield from (Event("consume", number=self.received.index(name)) for name in new)
                    yield from self._segment(action.number, 0)
                    given = [name for name in segment.outputs if name in self.sent]
                    yield from (Event("produce", number=self.sent.index(name)) for name in given)

    def _backward(self) -> Iterator[Event]:
        before = self.events.backward[0].inside_bytes if self.events.backward else 0
        pairs = zip(self.region.groups, self.events.groups, strict=True)
        saved = [self.prices.copies(b) for b, known in pairs if known.saved]
        now = before
        yield Event("compute", sum(c.packed_s for c in saved), before)
        yield Event("backward_unshard", inside_bytes=before)
        yield Event("compute", sum(c.unpacked_s for c in saved), before)
        if self.events.recomputed:
            now = self.events.recomputed[0].inside_bytes
            yield Event("recompute", inside_bytes=now)
        end = self.schedule.backward_end(self.boundary.slots)
        last = [self.schedule.last_readers.get(name, 0) for name in self.received]
        for k, action in enumerate(self.schedule.backward):
            if k >= end:
                yield Event("epilogue")
            for event in self._move(action.kind, action.number):
                # Prefetches and deferred gradients stand where the last segment was.
                now = event.inside_bytes or now
                yield replace(event, inside_bytes=now + sum(self.saved.values()))
            yield from (Event("produce", number=p) for p, at in enumerate(last) if at == k)

    def _move(self, kind: ActionKind, number: int) -> Iterator[Event]:
        match kind:
            case ActionKind.EPILOGUE:
                yield Event("run_epilogue")
            case ActionKind.BACKWARD if number not in self.idle:
                made = self.schedule.graph.segments[number].outputs
                for name in (name for name in made if name in self.sent):
                    yield Event("consume", number=self.sent.index(name))
                yield from self._segment(number, 1)
            case ActionKind.WEIGHTS:
                yield Event("compute", self.schedule.deferred_s[number])
                for saved in (self.saved, self.last_saved):
                    saved.pop(number, None)
            case ActionKind.REDUCE:
                yield Event("compute", self.prices.copies(self.region.groups[number]).reduced_s)
                yield Event("reduce", number=number)
            case ActionKind.PREFETCH:
                yield Event("backward_prefetch")

    def _segment(self, number: int, direction: int) -> Iterator[Event]:
        graph = self.schedule.graph
        segment = graph.segments[number]
        if segment.kind == "ops":
            yield from self._ops(number, segment, direction)
            return
        seconds, transfer, origin = self.prices.conversion(segment, direction)
        inside = self.inside[origin][direction]
        start = number if segment.kind == "start" else segment.partner
        if (segment.kind == "start") == (direction == 0):
            yield Event("compute", seconds, inside)
            if transfer is not None:
                yield Event("start", inside_bytes=inside, number=start, collective=transfer)
        elif transfer is not None:
            yield Event("wait", inside_bytes=inside, number=start)
            yield Event("compute", seconds, inside)

    def _ops(self, number: int, segment: OpsSegment, direction: int) -> Iterator[Event]:
        """The ops of a segment. Those behind a product whose gradient of the weight is deferred
        have what it is computed from beside them."""
        deferred = direction and number in self.schedule.deferred_s
        left_s = self.schedule.deferred_s[number] if deferred else 0.0
        saved = self.schedule.deferred_bytes[number] if deferred else {}
        for seconds, transfer, origin in self.prices.works(self.schedule.graph, segment, direction):
            for k, num_bytes in self.last_saved.items():
                self.saved[k] = self.saved.get(k, 0) + num_bytes
            self.last_saved = {}
            inside = self.inside[origin][direction]
            if transfer is not None:
                yield Event("inline", inside_bytes=inside, collective=transfer)
            # The products whose gradients of weights are deferred.
            now_s = min(left_s, seconds)
            left_s -= now_s
            yield Event("compute", seconds - now_s, inside)
            if transfer is None and isinstance(origin, int) and origin in saved:
                self.last_saved = {number: saved[origin]}
