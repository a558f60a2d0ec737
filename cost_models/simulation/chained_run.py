"""Chained regions in the simulated step: an instance runs the epilogue of the one before
(meshfold.ir.step_events)."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshfold.ir.step_events import Event


@dataclass
class Epilogue:
    """What is left of an instance for the next one to run."""

    instance: int
    moment: int = 0
    """The moment of the instance."""
    steps: deque[tuple[Event, ...]] = field(default_factory=deque)
    produced: set[int] = field(default_factory=set)
    """Chunks of the boundary value that are computed so far."""
    inside_bytes: int = 0
    """Alive inside the instance now."""


def split_epilogue(
    instance: int, events: Sequence[Event], moment: int
) -> tuple[tuple[Event, ...], Epilogue]:
    """(what an instance runs itself, its epilogue)."""
    groups: list[list[Event]] = [[]]
    for event in events:
        if event.kind == "epilogue":
            groups.append([])
        else:
            groups[-1].append(event)
    body, *steps = map(tuple[Event, ...], groups)
    return body, Epilogue(instance, moment, deque(steps))


class ChainedRun:
    """The instance that runs, and the epilogue of the one before. run_step: runs the next step of
    an epilogue, which is taken from it afterwards; leave: called once an instance is over."""

    def __init__(self, run_step: Callable[[Epilogue], None], leave: Callable[[int], None]) -> None:
        self.run_step = run_step
        self.leave = leave
        self.before = self.own = Epilogue(-1)

    def begin(self, instance: int, events: Sequence[Event], moment: int) -> tuple[Event, ...]:
        """What the next instance runs itself."""
        body, self.own = split_epilogue(instance, events, moment)
        return body

    def end(self) -> None:
        """The instance is done but for its own epilogue."""
        self.finish()
        self.before = self.own

    def advance(self) -> None:
        """Run the next step of the epilogue, if one is left."""
        epilogue = self.before
        if epilogue.steps:
            self.run_step(epilogue)
            epilogue.steps.popleft()
            if not epilogue.steps:
                self.leave(epilogue.instance)

    def finish(self) -> None:
        while self.before.steps:
            self.advance()

    def produce(self, instance: int, chunk: int) -> None:
        (self.own if instance == self.own.instance else self.before).produced.add(chunk)

    def consume(self, instance: int, chunk: int) -> None:
        """Run the epilogue until a chunk is there."""
        while instance == self.own.instance and self.before.steps:
            if chunk in self.before.produced:
                return
            self.advance()

    def inside(self, moment: int, inside_bytes: int) -> tuple[int, int]:
        """(moment, bytes alive inside instances then), where that of `moment` has inside_bytes. Of
        two overlapped instances the moment is that of the earlier in the model: what either has
        saved is inside of it."""
        if not self.before.steps:
            self.own.inside_bytes = inside_bytes
            return moment, inside_bytes
        both = self.before, self.own
        (both[0] if moment == both[0].moment else both[1]).inside_bytes = inside_bytes
        earlier = min(both, key=lambda epilogue: epilogue.instance)
        return earlier.moment, sum(epilogue.inside_bytes for epilogue in both)
