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


def _passed(streams: Streams, before: SimulatedPass) -> SimulatedPass:
    """What has run since `before`, which began with the step."""
    compute_s = streams.compute_s - before.compute_s
    exposed_s = streams.exposed_s - before.exposed_s
    contention_s = streams.now_s - before.seconds - compute_s - exposed_s
    transfers = tuple(streams.transfers[len(before.transfers) :])
    return SimulatedPass(compute_s, max(0.0, contention_s), exposed_s, transfers)
