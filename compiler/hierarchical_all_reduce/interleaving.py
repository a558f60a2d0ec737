"""The order in which steps of several all-reduces start."""

from collections import deque
from collections.abc import Generator
from typing import Generic, TypeVar

from meshfold.ir.node_groups import NUM_STEPS

T = TypeVar("T")


class Interleaver(Generic[T]):
    """All-reduces in flight, in the order in which they began. Each is a generator that starts one
    of NUM_STEPS steps and yields; resumed, it waits for that and starts the next. Whenever one
    begins, those in flight go on by one step, the oldest first: so all ranks start the same steps
    in the same order, and waits come late."""

    def __init__(self) -> None:
        self._running: deque[Generator[None, None, T]] = deque()
        self._started: dict[Generator[None, None, T], int] = {}

    def begin(self, steps: Generator[None, None, T]) -> None:
        self._go_on()
        next(steps)
        self._running.append(steps)
        self._started[steps] = 1

    def finish(self, steps: Generator[None, None, T]) -> T:
        """What it returns. Those behind it go on as well."""
        while self._started[steps] < NUM_STEPS:
            self._go_on()
        self._running.remove(steps)
        del self._started[steps]
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        raise AssertionError(f"there are {NUM_STEPS} steps")

    def _go_on(self) -> None:
        for steps in self._running:
            if self._started[steps] < NUM_STEPS:
                next(steps)
                self._started[steps] += 1
