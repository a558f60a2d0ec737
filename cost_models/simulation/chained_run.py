"""What an instance leaves to the next one in the simulated step (meshfold.ir.step_events)."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from meshfold.ir.step_events import Event


@dataclass
class Tail:
    """The last moves of an instance, run by the next one. moment: that of the instance; given:
    numbers of the parts that it has handed on so far; inside_bytes: alive inside it now."""

    instance: int
    moment: int = 0
    moves: deque[tuple[Event, ...]] = field(default_factory=deque)
    given: set[int] = field(default_factory=set)
    inside_bytes: int = 0

    @property
    def is_left(self) -> bool:
        """Whether a move is left, or runs."""
        return bool(self.moves)


def cut_tail(instance: int, events: Sequence[Event], moment: int) -> tuple[tuple[Event, ...], Tail]:
    """(what an instance runs itself, its tail)."""
    groups: list[list[Event]] = [[]]
    for event in events:
        if event.action == "leave":
            groups.append([])
        else:
            groups[-1].append(event)
    body, *moves = map(tuple[Event, ...], groups)
    return body, Tail(instance, moment, deque(moves))


def together(tails: Iterable[Tail]) -> int:
    """The moment of two instances that run beside each other: that of the earlier in the model.
    What either has kept is inside of it."""
    return min(tails, key=lambda tail: tail.instance).moment
