"""Reductions of gradients on the streams of a simulated rank, whole or in phases
(meshfold.ir.node_groups), as meshfold.zero.gradient_reduction runs them."""

from collections.abc import Generator

from meshfold.cost_models.simulation.streams import Streams, Transfer
from meshfold.ir.node_groups import Turns
from meshfold.ir.step_events import Collective


class Phased:
    """A reduction in phases. extra_bytes: of the part that goes through the network, beside the
    gradients themselves."""

    def __init__(self, of: Collective) -> None:
        self.extra_bytes = of.pieces * of.phases[1].num_bytes
        self._of = of
        self._last: Transfer | None = None

    @property
    def is_done(self) -> bool:
        return self._last is not None and self._last.is_done

    def run(self, streams: Streams, instance: int) -> Generator[None, None, None]:
        first, *others = self._of.phases
        flying = [streams.start(first, instance) for _ in range(self._of.pieces)]
        for phase in others:
            yield
            flying = [_after(streams, piece, phase, instance) for piece in flying]
        self._last = flying[-1]
        yield
        for piece in flying:
            streams.wait(piece)


def _after(streams: Streams, piece: Transfer, phase: Collective, instance: int) -> Transfer:
    streams.wait(piece)
    return streams.start(phase, instance)


class ReductionStreams:
    """All of a step."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._turns: Turns[None] = Turns()
        self._running: dict[Phased, Generator[None, None, None]] = {}

    def start(self, of: Collective, instance: int = -1) -> Transfer | Phased:
        if not of.phases:
            return self._streams.start(of, instance)
        one = Phased(of)
        self._running[one] = one.run(self._streams, instance)
        self._turns.begin(self._running[one])
        return one

    def finish(self, one: Transfer | Phased) -> None:
        """Wait until it is done."""
        if isinstance(one, Transfer):
            self._streams.wait(one)
        else:
            self._turns.finish(self._running.pop(one))
