"""A step simulated from its events, in the order in which the runtime issues them.

    forward    G first | per instance: events; "ahead" starts the next one's gathers; X release
    backward   per instance, last to first: events; "arrive" waits for own gathers, releases later
               instances, starts the gathers of the nearest earlier one that reads them again
    end        reductions are waited for in the order in which they started, then late ones, then
               the optimizer runs

(meshfold.codegen.emit.region.schedule, meshfold.zero.step.) What an instance leaves to the next one, its tail,
runs where that has it. Memory at an event is what is fixed, what is held
at its moment, what is alive inside the instance, gathered parameters from the start of their gather
to their release, and buckets from the start of their reduction until the link is done with them.
Merged reductions start with the last of their members; their buffer is there from the first on.
That of a merged gather stays until the last of its members has been copied out of it. An all-reduce
in phases (meshfold.ir.node_groups) has the part that crosses nodes beside the gradients themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from meshfold.cost_models.simulation.chained_run import Tail, cut_tail, together
from meshfold.cost_models.simulation.hierarchical_all_reduce import Phased, ReductionStreams
from meshfold.cost_models.simulation.streams import ComputeSpan, Streams, Transfer, overlap_rows
from meshfold.ir.bucketing import Place
from meshfold.ir.step_events import (
    BucketEvents,
    Collective,
    Event,
    MergedGather,
    MergedReduction,
    RegionEvents,
    SimulatedStep,
    StepEvents,
)


@dataclass(frozen=True)
class Simulation:
    """A simulated step with its course: what ran when, and (from, bytes alive) over time."""

    step: SimulatedStep
    spans: tuple[ComputeSpan, ...]
    transfers: tuple[Transfer, ...]
    memory: tuple[tuple[float, int], ...]


def simulate(events: StepEvents) -> Simulation:
    """Linear in the number of events."""
    run = _Run(events)
    run.forward()
    run.backward()
    run.end()
    streams = run.streams
    peak_s, peak_bytes = max(run.memory, key=lambda sample: sample[1])
    contention_s = streams.now_s - streams.compute_s - streams.exposed_s
    step = SimulatedStep(
        compute_s=streams.compute_s,
        # Rounding of sums may leave a little less than nothing.
        contention_s=max(0.0, contention_s),
        exposed_s=streams.exposed_s,
        overlap=overlap_rows(streams.transfers),
        peak_bytes=peak_bytes,
        peak_s=peak_s,
    )
    return Simulation(step, tuple(streams.spans), tuple(streams.transfers), tuple(run.memory))


class _Use:
    """A bucket of one instance during the step."""

    def __init__(self, instance: int, number: int, bucket: BucketEvents) -> None:
        self.instance = instance
        self.number = number
        self.bucket = bucket
        self.gather: Transfer | None = None
        self.buffer: _Buffer | None = None
        """Of a merged gather, until this one's parameters come out of it."""


@dataclass
class _Buffer:
    """Of a merged gather: its bytes, and how many buckets are still to come out of it."""

    num_bytes: int
    left: int


class _Merged:
    """Reductions that run as one, during the step. packed: members whose gradients are there."""

    def __init__(self, of: MergedReduction) -> None:
        self.of = of
        self.packed = 0
        self.flat_bytes = 0


class _Run:
    def __init__(self, events: StepEvents) -> None:
        self.events = events
        self.streams = Streams(events.slowdown)
        self.regions: list[RegionEvents] = [events.regions[r] for r in events.instances]
        self.uses = [
            [_Use(i, number, b) for number, b in enumerate(r.buckets)]
            for i, r in enumerate(self.regions)
        ]
        making = [i for i, r in enumerate(self.regions) if r.makes]
        self.first = making[:1]
        self.following = dict(zip(making, making[1:], strict=False))
        self.saving = [
            i for i, r in enumerate(self.regions) if not r.stays and any(b.saved for b in r.buckets)
        ]
        self.memory: list[tuple[float, int]] = []
        self.whole: dict[_Use, None] = {}
        """Gathered or in flight: their memory is taken."""
        self.whole_bytes = 0
        self.emptied_bytes = 0
        """Of buffers that the last of their members is being copied out of."""
        self.result_bytes = 0
        """Of reductions that began in the backward at hand; then they are held gradients."""
        self.flying: list[tuple[Transfer | Phased | None, int]] = []
        """Buffers of gradients, and the reductions that read them longer than one backward."""
        self.leaving: list[tuple[Transfer | Phased | None, int]] = []
        """As flying, of gradients that are inside the backward at hand."""
        self.reductions: list[Transfer | Phased] = []
        self.reducing = ReductionStreams(self.streams)
        self.merged = {
            place: merged for merged in map(_Merged, events.merged) for place in merged.of.places
        }
        self.gathers = {place: merged for merged in events.gathers for place in merged.places}
        self.is_backward = False
        self.waiting_bytes = 0
        """Of buffers of merged reductions whose last member is still to come."""
        self.started: dict[tuple[int, int], Transfer] = {}
        """Collectives on their way, by instance and number."""
        self.tail = Tail(-1)
        """What the instance before has left."""
        self.own = Tail(-1)
        """Of the instance at hand."""

    # The three parts of a step.

    def forward(self) -> None:
        for i in self.first:
            self._start_gathers(self.uses[i])
        for i, region in enumerate(self.regions):
            self._run(i, region.forward, moment=i)
        self.tail = Tail(-1)

    def backward(self) -> None:
        self.is_backward = True
        for uses, region in zip(self.uses, self.regions, strict=True):
            self._release([u for u in uses if not (u.bucket.saved or region.stays)])
        count = len(self.regions)
        self._start_saved_before(count)
        for i in reversed(range(count)):
            self._run(i, self.regions[i].backward, moment=2 * count - 1 - i)
            self._forget_packed()

    def end(self) -> None:
        for reduction in self.reductions:
            self.reducing.finish(reduction)
        for late in [self.reducing.start(c) for c in self.events.late]:
            self.reducing.finish(late)
        self._release(list(self.whole))
        self.flying = []
        self._note(2 * len(self.regions), 0)
        self.streams.compute(self.events.optimizer_s, is_backward=True)

    # Events.

    def _run(self, i: int, events: Sequence[Event], moment: int) -> None:
        """An instance, but for its tail, and the tail of the one before to its end."""
        body, self.own = cut_tail(i, events, moment)
        for event in body:
            self._act(i, event, moment)
        self._finish_tail()
        self.tail = self.own
        if not (self.tail.is_left or self.is_backward):
            self._leave(i)

    def _advance_tail(self) -> None:
        """The next move of what the instance before has left."""
        tail = self.tail
        if tail.is_left:
            results, flying = self.result_bytes, list(self.flying)
            for event in tail.moves[0]:
                self._act(tail.instance, event, tail.moment)
            tail.moves.popleft()
            # Its gradients are held at the moment of the instance at hand.
            self.result_bytes = results
            new = self.flying[len(flying) :]
            self.flying = [*flying, *((t, n) for t, n in new if t is not None)]
            if not tail.is_left:
                self._leave(tail.instance)

    def _finish_tail(self) -> None:
        while self.tail.is_left:
            self._advance_tail()

    def _leave(self, i: int) -> None:
        """An instance is over; its parameters are released as at the end of its body."""
        if self.is_backward:
            self._release([u for u in self.whole if u.instance > self.own.instance])
        elif i in self.following and not self.regions[i].stays:
            self._release(self.uses[i])

    def _act(self, i: int, event: Event, moment: int) -> None:
        streams, is_backward = self.streams, moment >= len(self.regions)
        match event.action:
            case "compute":
                self._note(moment, event.inside_bytes)
                streams.compute(event.seconds, i, is_backward=is_backward)
            case "inline":
                assert event.collective is not None
                self._note(moment, event.inside_bytes)
                streams.wait(streams.start(event.collective, i))
            case "open":
                use = self.uses[i][event.number]
                self._start_gathers([use])
                self._wait_for(use)
                self._note(moment, event.inside_bytes)
            case "ahead":
                self._finish_tail()
                if i in self.following:
                    self._start_gathers(self.uses[self.following[i]])
                    self._note(moment, event.inside_bytes)
            case "start":
                assert event.collective is not None
                self.started[i, event.number] = streams.start(event.collective, i)
                self._note(moment, event.inside_bytes)
            case "wait":
                streams.wait(self.started.pop((i, event.number)))
            case "arrive" | "settle":
                self._arrive(i)
                if event.action == "arrive":
                    self._start_saved_before(i)
                self._note(moment, event.inside_bytes)
            case "again":
                for one in self.regions[i].again:
                    self._act(i, one, moment)
            case "before":
                self._finish_tail()
                self._start_saved_before(i)
                self._note(moment, event.inside_bytes)
            case "reduce":
                self._reduce(self.uses[i][event.number], event, moment)
            case "next":
                self._advance_tail()
            case "give":
                (self.own if i == self.own.instance else self.tail).given.add(event.number)
            case "take" if i == self.own.instance:
                while self.tail.is_left and event.number not in self.tail.given:
                    self._advance_tail()

    def _arrive(self, i: int) -> None:
        busy = self.tail.instance if self.tail.is_left else i
        self._release([u for u in self.whole if u.instance > busy])
        own = [u for u in self.uses[i] if u.bucket.saved]
        self._start_gathers(own)
        for use in own:
            self._wait_for(use)

    def _start_saved_before(self, i: int) -> None:
        while self.saving and self.saving[-1] >= i:
            self.saving.pop()
        if self.saving:
            self._start_gathers([u for u in self.uses[self.saving[-1]] if u.bucket.saved])

    def _start_gathers(self, uses: Sequence[_Use]) -> None:
        for use in uses:
            if use not in self.whole:
                merged = self.gathers.get((use.instance, use.number))
                if merged is not None:
                    self._start_merged_gather(merged, use)
                    continue
                self.whole[use] = None
                self.whole_bytes += use.bucket.whole_bytes
                if use.bucket.gather is not None:
                    use.gather = self.streams.start(use.bucket.gather, use.instance)

    def _start_merged_gather(self, merged: MergedGather, first: _Use) -> None:
        """Backward: of those that are read again."""
        members = [self.uses[instance][number] for instance, number in merged.places]
        of: Collective | None = merged.collective
        if self.is_backward:
            members = [use for use in members if use.bucket.saved and use not in self.whole]
            of = merged.again
        assert of is not None
        transfer = self.streams.start(of, first.instance)
        buffer = _Buffer(sum(use.bucket.whole_bytes for use in members), len(members))
        self.whole_bytes += buffer.num_bytes
        for use in members:
            self.whole[use] = None
            use.gather, use.buffer = transfer, buffer

    def _wait_for(self, use: _Use) -> None:
        if use.gather is not None:
            self.streams.wait(use.gather)
        if use.buffer is not None:
            self.whole_bytes += use.bucket.whole_bytes
            self._leave_buffer(use)

    def _leave_buffer(self, use: _Use) -> None:
        """The buffer of a merged gather goes with the last that comes out of it."""
        assert use.buffer is not None
        use.buffer.left -= 1
        if not use.buffer.left:
            self.emptied_bytes += use.buffer.num_bytes
        use.buffer = None

    def _release(self, uses: Sequence[_Use]) -> None:
        for use in uses:
            if use in self.whole:
                del self.whole[use]
                use.gather = None
                if use.buffer is not None:
                    self._leave_buffer(use)
                else:
                    self.whole_bytes -= use.bucket.whole_bytes

    def _reduce(self, use: _Use, event: Event, moment: int) -> None:
        self._release([use])
        bucket = use.bucket
        merged = self.merged.get((use.instance, event.number))
        if merged is not None:
            self._pack(merged, use)
        else:
            reduction = None
            if bucket.reduce is not None:
                reduction = self._start_reduction(bucket.reduce, use)
            of = self.leaving if bucket.reduces_gradient else self.flying
            of.append((reduction, bucket.flat_bytes))
        self.result_bytes += bucket.result_bytes
        self._note(moment, event.inside_bytes)

    def _start_reduction(self, of: Collective, use: _Use) -> Transfer | None:
        """What reads the buffer of gradients longer than the backward at hand, if anything: what is
        not scattered is the gradient itself, and held as such from the next moment."""
        reduction = self.reducing.start(of, use.instance)
        self.reductions.append(reduction)
        if isinstance(reduction, Phased):
            self.flying.append((reduction, reduction.extra_bytes))
            return None
        return reduction if of.kind == "reduce_scatter" else None

    def _pack(self, merged: "_Merged", use: _Use) -> None:
        """The first of merged reductions makes the buffer of all, the last one starts it."""
        of = merged.of.collective
        if not merged.packed:
            merged.flat_bytes = sum(self._flat_bytes(place) for place in merged.of.places)
            self.waiting_bytes += merged.flat_bytes
        merged.packed += 1
        is_last = merged.packed == len(merged.of.places)
        if of.kind != "reduce_scatter":
            self.waiting_bytes -= use.bucket.flat_bytes
            self.flying.append((None, use.bucket.flat_bytes))
        elif is_last:
            self.waiting_bytes -= merged.flat_bytes
        if is_last:
            reading = self._start_reduction(of, use)
            if reading is not None:
                self.flying.append((reading, merged.flat_bytes))

    def _flat_bytes(self, place: Place) -> int:
        instance, number = place
        return self.regions[instance].buckets[number].flat_bytes

    def _forget_packed(self) -> None:
        """A backward is over: results count as gradients, buffers stay while a link reads them."""
        self.result_bytes = 0
        flying = (*self.flying, *self.leaving)
        self.flying = [(t, n) for t, n in flying if t is not None and not t.is_done]
        self.leaving = []

    def _note(self, moment: int, inside_bytes: int) -> None:
        flying = sum(n for t, n in self.flying if t is None or not t.is_done)
        if self.tail.is_left:
            of = self.tail if moment == self.tail.moment else self.own
            of.inside_bytes = inside_bytes
            inside_bytes = self.tail.inside_bytes + self.own.inside_bytes
            moment = together((self.tail, self.own))
        else:
            self.own.inside_bytes = inside_bytes
        total = self.events.fixed_bytes + self.events.held_bytes[moment] + inside_bytes
        total += self.whole_bytes + flying + self.result_bytes + self.waiting_bytes
        self.memory.append((self.streams.now_s, total))
        self.whole_bytes -= self.emptied_bytes
        self.emptied_bytes = 0
