"""Discrete events of one rank: a compute stream and one stream per link level.

Work is issued in one order by one thread. A collective queues on its link, first come first served,
from the moment compute reaches the point where it is started; compute goes on, until it is told to
wait for it. While compute and a collective both run, both are slower by `slowdown` k, see
DeviceSpec.overlap_slowdown:

    rate of compute  1/k while any link is busy, else 1
    rate of a link   1/k while compute runs, else 1

so C seconds of compute over B seconds of communication take max(B, C) + (k - 1) min(B, C), the form
of Galvatron (Miao et al., VLDB 2023). For 1 <= k <= 2 a step takes at least what compute, and what
each link, takes alone, and at most their sum; and less work anywhere never makes it longer: with T
the time at which compute reaches a point of the program, and R what a link then has left, smaller
work keeps both T and T + R smaller or equal for every link (k <= 2 is what the second needs, where
one run is contended and the other is not).
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from meshfold.ir.step_events import CollectiveEvent, OverlapRow


def overlapped_s(first_s: float, second_s: float, slowdown: float) -> float:
    """Seconds of compute and a collective that begin together."""
    return max(first_s, second_s) + (slowdown - 1) * min(first_s, second_s)


@dataclass(slots=True)
class Transfer:
    """A collective on its link. issued_s: when it was started by compute; start_s, end_s: when the
    link ran it; exposed_s: of that time, how long compute did nothing but wait."""

    collective: CollectiveEvent
    instance: int
    issued_s: float
    left_s: float
    start_s: float = -1.0
    end_s: float = -1.0
    exposed_s: float = 0.0

    @property
    def is_done(self) -> bool:
        return self.end_s >= 0

    @property
    def hidden_s(self) -> float:
        """Overlapped by compute."""
        return max(0.0, self.end_s - self.start_s - self.exposed_s)


@dataclass(frozen=True, slots=True)
class ComputeSpan:
    """Kernels without a break, contention included."""

    instance: int
    is_backward: bool
    start_s: float
    end_s: float


class Streams:
    """The streams of one rank. Raises ValueError for a slowdown outside of 1 to 2."""

    def __init__(self, slowdown: float) -> None:
        if not 1 <= slowdown <= 2:
            raise ValueError(f"slowdown {slowdown}: is from 1 (none) to 2 (no gain from overlap)")
        self.slowdown = slowdown
        self.now_s = 0.0
        self.compute_s = 0.0
        self.exposed_s = 0.0
        self.transfers: list[Transfer] = []
        self.spans: list[ComputeSpan] = []
        self._queues: dict[str, deque[Transfer]] = {}

    def start(self, collective: CollectiveEvent, instance: int = -1) -> Transfer:
        """Issue a collective now."""
        transfer = Transfer(collective, instance, self.now_s, collective.seconds)
        self.transfers.append(transfer)
        if collective.seconds <= 0:
            transfer.start_s = transfer.end_s = self.now_s
            return transfer
        queue = self._queues.setdefault(collective.link, deque())
        if not queue:
            transfer.start_s = self.now_s
        queue.append(transfer)
        return transfer

    def compute(self, seconds: float, instance: int = -1, *, is_backward: bool = False) -> None:
        """Run kernels of `seconds` alone."""
        begin_s, left_s = self.now_s, seconds
        self.compute_s += seconds
        while left_s > 0:
            heads = [q[0].left_s for q in self._queues.values() if q]
            if not heads:
                self.now_s += left_s
                break
            done_s = min(left_s, *heads)
            left_s -= done_s
            self._advance(done_s, self.slowdown * done_s)
        if seconds > 0:
            self._note_span(ComputeSpan(instance, is_backward, begin_s, self.now_s))

    def wait(self, transfer: Transfer) -> None:
        """Let compute do nothing until `transfer` is done. What is on its link meanwhile, itself or
        one that it queues behind, is exposed."""
        queue = self._queues.get(transfer.collective.link)
        while not transfer.is_done:
            assert queue
            step_s = min(q[0].left_s for q in self._queues.values() if q)
            queue[0].exposed_s += step_s
            self.exposed_s += step_s
            self._advance(step_s, step_s)

    def _advance(self, done_s: float, passing_s: float) -> None:
        """All links do `done_s` of their work while `passing_s` pass; none has less left."""
        self.now_s += passing_s
        for queue in self._queues.values():
            if not queue:
                continue
            head = queue[0]
            head.left_s -= done_s
            if head.left_s <= 0:
                head.end_s = self.now_s
                queue.popleft()
                if queue:
                    queue[0].start_s = self.now_s

    def _note_span(self, span: ComputeSpan) -> None:
        """Kernels that follow each other are one span."""
        before = self.spans[-1] if self.spans else None
        if before is not None and before.end_s == span.start_s:
            if (before.instance, before.is_backward) == (span.instance, span.is_backward):
                self.spans.pop()
                span = ComputeSpan(span.instance, span.is_backward, before.start_s, span.end_s)
        self.spans.append(span)


def overlap_rows(transfers: Sequence[Transfer]) -> tuple[OverlapRow, ...]:
    """What is hidden and what exposed, by kind and axes, in order of first use."""
    groups: dict[tuple[str, tuple[str, ...]], list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        groups[transfer.collective.kind, transfer.collective.axes].append(transfer)
    return tuple(
        OverlapRow(
            *key, len(members), sum(t.hidden_s for t in members), sum(t.exposed_s for t in members)
        )
        for key, members in groups.items()
    )
