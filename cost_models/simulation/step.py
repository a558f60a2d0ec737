"""A step simulated from its events, in the order in which the runtime issues them.

    forward    G first | per instance: events; "forward_prefetch" starts the next one's gathers;
               X release
    backward   per instance, last to first: events; "pre_backward" waits for own gathers, releases
               later instances, starts the gathers of the nearest earlier one that reads them again
    end        reductions are waited for in the order in which they started, then trailing ones,
               then the optimizer runs

(meshfold.codegen.emit.region.schedule, meshfold.zero.step.) The next instance runs the epilogue of
one (chained_run.py). Memory at an event is what is fixed, what is resident at its moment, what is
alive inside the instance, gathered parameters from the start of their gather to their release, and
gradients from the start of their reduction until the link is done with them. The reduction of a
bucket starts with the last of its members; its buffer is allocated with the first. The buffer of a
gather is freed once the last of its members has been copied out of it. A hierarchical all-reduce
(meshfold.ir.node_groups) has the shard that crosses nodes besides the gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from meshfold.cost_models.simulation.chained_run import ChainedRun, Epilogue
from meshfold.cost_models.simulation.gradient_buffers import GradientBuffers
from meshfold.cost_models.simulation.hierarchical_all_reduce import ReductionStreams
from meshfold.cost_models.simulation.streams import ComputeSpan, Streams, Transfer, overlap_rows
from meshfold.ir.step_events import (
    AllGatherBucket,
    CollectiveEvent,
    Event,
    ParameterGroupEvents,
    RegionEvents,
    SimulatedStep,
    StepEvents,
)


@dataclass(frozen=True)
class Simulation:
    """A simulated step with its timeline: what ran when, and (from, bytes alive) over time."""

    step: SimulatedStep
    spans: tuple[ComputeSpan, ...]
    transfers: tuple[Transfer, ...]
    memory: tuple[tuple[float, int], ...]


def simulate(events: StepEvents) -> Simulation:
    """Linear in the number of events."""
    run = StepRun(events)
    run.forward()
    run.backward()
    run.finish_reductions()
    run.update()
    streams = run.streams
    peak_s, peak_bytes = max(run.memory, key=lambda sample: sample[1])
    contention_s = streams.now_s - streams.compute_s - streams.exposed_s
    step = SimulatedStep(
        compute_s=streams.compute_s,
        # Rounding of sums may leave a little less than zero.
        contention_s=max(0.0, contention_s),
        exposed_s=streams.exposed_s,
        overlap=overlap_rows(streams.transfers),
        peak_bytes=peak_bytes,
        peak_s=peak_s,
    )
    return Simulation(step, tuple(streams.spans), tuple(streams.transfers), tuple(run.memory))


class _Use:
    """A parameter group of one instance during the step."""

    def __init__(self, instance: int, number: int, group: ParameterGroupEvents) -> None:
        self.instance = instance
        self.number = number
        self.group = group
        self.gather: Transfer | None = None
        self.buffer: _Buffer | None = None
        """The buffer of a bucketed gather, until this one's parameters are copied out of it."""


@dataclass
class _Buffer:
    """The buffer of a bucketed gather. left: how many members are still to be copied out."""

    num_bytes: int
    left: int


class StepRun:
    """The runtime during one step. releases_all: whether the parameters of the last instance are
    released after its forward, too."""

    def __init__(self, events: StepEvents, *, releases_all: bool = False) -> None:
        self.events = events
        self.releases_all = releases_all
        self.streams = Streams(events.slowdown)
        self.regions: list[RegionEvents] = [events.regions[r] for r in events.instances]
        self.uses = [
            [_Use(i, number, b) for number, b in enumerate(r.groups)]
            for i, r in enumerate(self.regions)
        ]
        making = [i for i, r in enumerate(self.regions) if r.unshards]
        self.first = making[:1]
        self.following = dict(zip(making, making[1:], strict=False))
        self.saving = [
            i
            for i, r in enumerate(self.regions)
            if r.reshard_after_forward and any(b.saved for b in r.groups)
        ]
        self.memory: list[tuple[float, int]] = []
        self.unsharded: dict[_Use, None] = {}
        """Gathered or in flight: their memory is allocated."""
        self.unsharded_bytes = 0
        self.copied: set[_Use] = set()
        """What was copied out of buffers of its own."""
        self.emptied_bytes = 0
        """Bytes of buffers that the last of their members is being copied out of."""
        self.reducing = ReductionStreams(self.streams)
        self.gradient_buffers = GradientBuffers(
            self.reducing,
            [r.groups for r in self.regions],
            events.reduce_buckets,
            adds_shards=events.adds_shards,
        )
        self.gathers = {g: bucket for bucket in events.allgather_buckets for g in bucket.groups}
        self.is_backward = False
        self.started: dict[tuple[int, int], Transfer] = {}
        """Collectives on their way, by instance and number."""
        self.chained = ChainedRun(self._run_epilogue_step, self._leave)

    # The three parts of a step.

    def forward(self) -> None:
        for i in self.first:
            self._start_gathers(self.uses[i])
        for i, region in enumerate(self.regions):
            self._run(i, region.forward, moment=i)
        self.chained.before = Epilogue(-1)

    def gather_ahead(self, *, opens: bool) -> None:
        """Before the input of a stage is there: start the gathers of parameters that stay, and with
        `opens` those of the first region that has any."""
        for i, region in enumerate(self.regions):
            if not region.reshard_after_forward or opens and i in self.first:
                self._start_gathers(self.uses[i])

    def backward(self) -> None:
        self.is_backward = True
        for uses, region in zip(self.uses, self.regions, strict=True):
            self._release(
                [u for u in uses if not (u.group.saved or not region.reshard_after_forward)]
            )
        count = len(self.regions)
        self._start_saved_before(count)
        for i in reversed(range(count)):
            self._run(i, self.regions[i].backward, moment=2 * count - 1 - i)
            self.gradient_buffers.end_instance()

    def finish_reductions(self) -> None:
        for reduction in self.gradient_buffers.started:
            self.reducing.finish(reduction)
        for trailing in [self.reducing.start(c) for c in self.events.trailing]:
            self.reducing.finish(trailing)

    def update(self) -> None:
        self._release(list(self.unsharded))
        self.gradient_buffers.end_backward()
        self._note(2 * len(self.regions), 0)
        self.streams.compute(self.events.optimizer_s, is_backward=True)

    # Events.

    def _run(self, i: int, events: Sequence[Event], moment: int) -> None:
        """An instance but for its epilogue, and the rest of the epilogue of the one before."""
        for event in self.chained.begin(i, events, moment):
            self._act(i, event, moment)
        self.chained.end()
        if not (self.chained.before.steps or self.is_backward):
            self._leave(i)

    def _run_epilogue_step(self, epilogue: Epilogue) -> None:
        mark = self.gradient_buffers.begin_epilogue_step()
        for event in epilogue.steps[0]:
            self._act(epilogue.instance, event, epilogue.moment)
        self.gradient_buffers.end_epilogue_step(mark)

    def _leave(self, i: int) -> None:
        """An instance is over; its parameters are released as at the end of its body."""
        if self.is_backward:
            self._release([u for u in self.unsharded if u.instance > self.chained.own.instance])
        elif self.regions[i].reshard_after_forward and (i in self.following or self.releases_all):
            self._release(self.uses[i])

    def _act(self, i: int, event: Event, moment: int) -> None:
        streams, is_backward = self.streams, moment >= len(self.regions)
        match event.kind:
            case "compute":
                self._note(moment, event.inside_bytes)
                streams.compute(event.seconds, i, is_backward=is_backward)
            case "inline":
                assert event.collective is not None
                self._note(moment, event.inside_bytes)
                streams.wait(streams.start(event.collective, i))
            case "unshard":
                use = self.uses[i][event.number]
                self._start_gathers([use])
                self._wait_for(use)
                self._note(moment, event.inside_bytes)
            case "forward_prefetch":
                self.chained.finish()
                if i in self.following:
                    self._start_gathers(self.uses[self.following[i]])
                    self._note(moment, event.inside_bytes)
            case "start":
                assert event.collective is not None
                self.started[i, event.number] = streams.start(event.collective, i)
                self._note(moment, event.inside_bytes)
            case "wait":
                streams.wait(self.started.pop((i, event.number)))
            case "pre_backward" | "backward_unshard":
                self._arrive(i)
                if self.emptied_bytes:
                    self._note(moment, event.inside_bytes)
                if event.kind == "pre_backward":
                    self._start_saved_before(i)
                self._note(moment, event.inside_bytes)
            case "recompute":
                for one in self.regions[i].recomputed:
                    self._act(i, one, moment)
            case "backward_prefetch":
                self.chained.finish()
                self._start_saved_before(i)
                self._note(moment, event.inside_bytes)
            case "reduce":
                self._reduce(self.uses[i][event.number], event, moment)
            case "run_epilogue":
                self.chained.advance()
            case "produce":
                self.chained.produce(i, event.number)
            case "consume":
                self.chained.consume(i, event.number)

    def _arrive(self, i: int) -> None:
        before = self.chained.before
        busy = before.instance if before.steps else i
        self._release([u for u in self.unsharded if u.instance > busy])
        own = [u for u in self.uses[i] if u.group.saved]
        self._start_gathers(own)
        for use in own:
            self._wait_for(use)

    def _start_saved_before(self, i: int) -> None:
        while self.saving and self.saving[-1] >= i:
            self.saving.pop()
        if self.saving:
            self._start_gathers([u for u in self.uses[self.saving[-1]] if u.group.saved])

    def _start_gathers(self, uses: Sequence[_Use]) -> None:
        for use in uses:
            if use not in self.unsharded:
                bucket = self.gathers.get((use.instance, use.number))
                if bucket is not None:
                    self._start_bucketed_gather(bucket, use)
                    continue
                self.unsharded[use] = None
                self.unsharded_bytes += use.group.unsharded_bytes
                if use.group.gather is not None:
                    use.gather = self.streams.start(use.group.gather, use.instance)

    def _start_bucketed_gather(self, bucket: AllGatherBucket, first: _Use) -> None:
        """The backward gathers what it reads a second time."""
        members = [self.uses[instance][number] for instance, number in bucket.groups]
        of: CollectiveEvent | None = bucket.collective
        if self.is_backward:
            members = [use for use in members if use.group.saved and use not in self.unsharded]
            of = bucket.regather
        assert of is not None
        transfer = self.streams.start(of, first.instance)
        buffer = _Buffer(sum(use.group.unsharded_bytes for use in members), len(members))
        self.unsharded_bytes += buffer.num_bytes
        for use in members:
            self.unsharded[use] = None
            use.gather, use.buffer = transfer, buffer

    def _wait_for(self, use: _Use) -> None:
        if use.gather is not None:
            self.streams.wait(use.gather)
            if use.buffer is None and not (use.group.is_unbucketed or use in self.copied):
                self.unsharded_bytes += use.group.unsharded_bytes
                self.emptied_bytes += use.group.unsharded_bytes
                self.copied.add(use)
        if use.buffer is not None:
            self.unsharded_bytes += use.group.unsharded_bytes
            self._leave_buffer(use)

    def _leave_buffer(self, use: _Use) -> None:
        """The buffer is freed with the last that is copied out of it."""
        assert use.buffer is not None
        use.buffer.left -= 1
        if not use.buffer.left:
            self.emptied_bytes += use.buffer.num_bytes
        use.buffer = None

    def _release(self, uses: Sequence[_Use]) -> None:
        for use in uses:
            if use in self.unsharded:
                del self.unsharded[use]
                self.copied.discard(use)
                use.gather = None
                if use.buffer is not None:
                    self._leave_buffer(use)
                else:
                    self.unsharded_bytes -= use.group.unsharded_bytes

    def _reduce(self, use: _Use, event: Event, moment: int) -> None:
        self._release([use])
        self.gradient_buffers.reduce(use.instance, event.number)
        self._note(moment, event.inside_bytes)

    def _note(self, moment: int, inside_bytes: int) -> None:
        moment, inside_bytes = self.chained.inside(moment, inside_bytes)
        self._record(moment, inside_bytes, self.gradient_buffers.num_bytes)
        self.unsharded_bytes -= self.emptied_bytes
        self.emptied_bytes = 0

    def _record(self, moment: int, inside_bytes: int, buckets_bytes: int) -> None:
        total = self.events.fixed_bytes + self.events.resident_bytes[moment] + inside_bytes
        self.memory.append((self.streams.now_s, total + self.unsharded_bytes + buckets_bytes))
