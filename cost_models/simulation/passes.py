"""Forward and backward of one microbatch on one stage, simulated apart (pipeline.py)."""

from dataclasses import dataclass, replace

from meshfold.cost_models.simulation.step import StepRun
from meshfold.cost_models.simulation.streams import Streams, Transfer
from meshfold.ir.step_events import StepEvents


@dataclass(frozen=True)
class SimulatedPass:
    """A pass of one microbatch by itself: none leaves anything on the links to the next one."""

    compute_s: float = 0.0
    contention_s: float = 0.0
    exposed_s: float = 0.0
    transfers: tuple[Transfer, ...] = ()
    tail_s: float = 0.0
    """Of a backward the end of exposed_s: its reductions, behind the gradients that it sends."""

    @property
    def seconds(self) -> float:
        return self.compute_s + self.contention_s + self.exposed_s

    def waiting(self, seconds: float) -> "SimulatedPass":
        """The pass with another wait of so many seconds."""
        return replace(self, exposed_s=self.exposed_s + seconds)


def simulate_passes(events: StepEvents) -> tuple[SimulatedPass, SimulatedPass]:
    """The forward and the backward of a stage, without the optimizer's update. Gathered parameters
    of its last region are released as well: other passes may come between the two."""
    run = StepRun(events, releases_all=True)
    run.forward()
    forward = _passed(run.streams, SimulatedPass())
    run.backward()
    sent_s = run.streams.now_s
    run.finish_reductions()
    backward = _passed(run.streams, forward)
    return forward, replace(backward, tail_s=run.streams.now_s - sent_s)


@dataclass(frozen=True)
class AheadForward:
    """The first forward of a stage whose gathers began before its input was there."""

    gathers: tuple[Transfer, ...]
    """What was gathered ahead, all of it exposed."""
    gathered_s: float
    """Seconds of these gathers."""
    found: SimulatedPass
    """The forward that finds them done."""
    at_once_s: float
    """From the first gather to the end of a forward whose input is there from the start. One whose
    input comes t seconds later ends at max(at_once_s, t + found.seconds): each of its layers waits
    for its gather or for the layer before."""

    def held(self, seconds: float) -> SimulatedPass:
        """Its wait of so many seconds for the gathers."""
        share = min(1.0, seconds / self.gathered_s) if seconds else 0.0
        of = (replace(t, exposed_s=share * t.exposed_s) for t in self.gathers)
        return SimulatedPass(exposed_s=seconds, transfers=tuple(of))


def simulate_ahead(events: StepEvents, *, opens: bool) -> AheadForward:
    """The first forward with the gathers that the runtime starts ahead (StepRun.gather_ahead). What
    compute and gathers cost each other is in at_once_s alone. Copies into the buffers of gathers
    are counted with the forward."""
    at_once = StepRun(events, releases_all=True)
    at_once.gather_ahead(opens=opens)
    at_once.forward()
    run = StepRun(events, releases_all=True)
    run.gather_ahead(opens=opens)
    for gather in run.streams.transfers:
        run.streams.wait(gather)
    gathering = _passed(run.streams, SimulatedPass())
    run.forward()
    found = _passed(run.streams, gathering)
    return AheadForward(gathering.transfers, gathering.seconds, found, at_once.streams.now_s)


def _passed(streams: Streams, before: SimulatedPass) -> SimulatedPass:
    """What has run since `before`, which began with the step."""
    compute_s = streams.compute_s - before.compute_s
    exposed_s = streams.exposed_s - before.exposed_s
    contention_s = streams.now_s - before.seconds - compute_s - exposed_s
    transfers = tuple(streams.transfers[len(before.transfers) :])
    return SimulatedPass(compute_s, max(0.0, contention_s), exposed_s, transfers)
