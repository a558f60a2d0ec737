"""A step simulated from its events, in the order in which the runtime issues them.

    forward    G first | per instance: events; "ahead" starts the next one's gathers; X release
    backward   per instance, last to first: events; "arrive" waits for own gathers, releases later
               instances, starts the gathers of the nearest earlier one that reads them again
    end        reductions are waited for in the order in which they started, then late ones, then
               the optimizer runs

(meshfold.emit.schedule, meshfold.training_step.) Memory at an event is what is fixed, what is held
at its moment, what is alive inside the instance, gathered parameters from the start of their gather
to their release, and buckets from the start of their reduction until the link is done with them.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from meshfold.cost_models.events import ComputeSpan, Streams, Transfer
from meshfold.step_events import (
    BucketEvents,
    Event,
    OverlapRow,
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
        overlap=_overlap(streams.transfers),
        peak_bytes=peak_bytes,
        peak_s=peak_s,
    )
    return Simulation(step, tuple(streams.spans), tuple(streams.transfers), tuple(run.memory))


class _Use:
    """A bucket of one instance during the step."""

    def __init__(self, instance: int, bucket: BucketEvents) -> None:
        self.instance = instance
        self.bucket = bucket
        self.gather: Transfer | None = None


class _Run:
    def __init__(self, events: StepEvents) -> None:
        self.events = events
        self.streams = Streams(events.slowdown)
        self.regions: list[RegionEvents] = [events.regions[r] for r in events.instances]
        self.uses = [[_Use(i, b) for b in r.buckets] for i, r in enumerate(self.regions)]
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
        self.result_bytes = 0
        """Of reductions that began in the backward at hand; then they are held gradients."""
        self.flying: list[tuple[Transfer | None, int]] = []
        """Buffers of gradients, and the reductions that read them longer than one backward."""
        self.reductions: list[Transfer] = []
        self.started: dict[int, Transfer] = {}
        """Collectives of the instance at hand on their way, by number."""

    # The three parts of a step.

    def forward(self) -> None:
        for i in self.first:
            self._start_gathers(self.uses[i])
        for i, region in enumerate(self.regions):
            for event in region.forward:
                self._act(i, event, moment=i)
            if i in self.following and not region.stays:
                self._release(self.uses[i])

    def backward(self) -> None:
        for uses, region in zip(self.uses, self.regions, strict=True):
            self._release([u for u in uses if not (u.bucket.saved or region.stays)])
        count = len(self.regions)
        self._start_saved_before(count)
        for i in reversed(range(count)):
            for event in self.regions[i].backward:
                self._act(i, event, moment=2 * count - 1 - i)
            self._forget_packed()

    def end(self) -> None:
        for reduction in self.reductions:
            self.streams.wait(reduction)
        for late in [self.streams.start(c) for c in self.events.late]:
            self.streams.wait(late)
        self._release(list(self.whole))
        self.flying = []
        self._note(2 * len(self.regions), 0)
        self.streams.compute(self.events.optimizer_s, is_backward=True)

    # Events.

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
                if i in self.following:
                    self._start_gathers(self.uses[self.following[i]])
                    self._note(moment, event.inside_bytes)
            case "start":
                assert event.collective is not None
                self.started[event.number] = streams.start(event.collective, i)
                self._note(moment, event.inside_bytes)
            case "wait":
                streams.wait(self.started.pop(event.number))
            case "arrive" | "settle":
                self._arrive(i)
                if event.action == "arrive":
                    self._start_saved_before(i)
                self._note(moment, event.inside_bytes)
            case "again":
                for one in self.regions[i].again:
                    self._act(i, one, moment)
            case "before":
                self._start_saved_before(i)
                self._note(moment, event.inside_bytes)
            case "reduce":
                self._reduce(self.uses[i][event.number], event, moment)

    def _arrive(self, i: int) -> None:
        self._release([u for u in self.whole if u.instance > i])
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
                self.whole[use] = None
                self.whole_bytes += use.bucket.whole_bytes
                if use.bucket.gather is not None:
                    use.gather = self.streams.start(use.bucket.gather, use.instance)

    def _wait_for(self, use: _Use) -> None:
        if use.gather is not None:
            self.streams.wait(use.gather)

    def _release(self, uses: Sequence[_Use]) -> None:
        for use in uses:
            if use in self.whole:
                del self.whole[use]
                use.gather = None
                self.whole_bytes -= use.bucket.whole_bytes

    def _reduce(self, use: _Use, event: Event, moment: int) -> None:
        self._release([use])
        bucket, reading = use.bucket, None
        if bucket.reduce is not None:
            reduction = self.streams.start(bucket.reduce, use.instance)
            self.reductions.append(reduction)
            # What is not scattered is the gradient itself, and held as such from the next moment.
            reading = reduction if bucket.reduce.kind == "reduce_scatter" else None
        self.flying.append((reading, bucket.flat_bytes))
        self.result_bytes += bucket.result_bytes
        self._note(moment, event.inside_bytes)

    def _forget_packed(self) -> None:
        """A backward is over: results count as gradients, buffers stay while a link reads them."""
        self.result_bytes = 0
        self.flying = [(t, n) for t, n in self.flying if t is not None and not t.is_done]

    def _note(self, moment: int, inside_bytes: int) -> None:
        flying = sum(n for t, n in self.flying if t is None or not t.is_done)
        total = self.events.fixed_bytes + self.events.held_bytes[moment] + inside_bytes
        total += self.whole_bytes + flying + self.result_bytes
        self.memory.append((self.streams.now_s, total))


def _overlap(transfers: Sequence[Transfer]) -> tuple[OverlapRow, ...]:
    """By kind and axes, in order of first use."""
    groups: dict[tuple[str, tuple[str, ...]], list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        groups[transfer.collective.kind, transfer.collective.axes].append(transfer)
    return tuple(
        OverlapRow(
            kind,
            axes,
            len(members),
            sum(t.hidden_s for t in members),
            sum(t.exposed_s for t in members),
        )
        for (kind, axes), members in groups.items()
    )
