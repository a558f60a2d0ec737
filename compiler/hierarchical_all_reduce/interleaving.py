"""The order in which steps of several reductions start."""

from collections import deque
from collections.abc import Generator
from typing import Generic, TypeVar

from meshfold.ir.node_groups import NUM_STEPS

T = TypeVar("T")


class Interleaver(Generic[T]):
    """Reductions in flight, in the order in which they began. Each is a generator that starts one
    of its steps and yields; resumed, it waits for that and starts the next. Whenever one
    begins, those in flight go on by one step, the oldest first: so all ranks start the same steps
    in the same order, and waits come late."""

    def __init__(self) -> None:
        self._running: deque[Generator[None, None, T]] = deque()
        self._left: dict[Generator[None, None, T], int] = {}

    def begin(self, steps: Generator[None, None, T], num_steps: int = NUM_STEPS) -> None:
        """Start the first of num_steps steps."""
        self._go_on()
        next(steps)
        self._running.append(steps)
        self._left[steps] = num_steps - 1

    def finish(self, steps: Generator[None, None, T]) -> T:
        """What it returns. Those behind it go on as well."""
        while self._left[steps]:
            self._go_on()
        self._running.remove(steps)
        del self._left[steps]
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        raise AssertionError("it has more steps than it was begun with")

    def _go_on(self) -> None:
        for steps in self._running:
            if self._left[steps]:
                next(steps)
                self._left[steps] -= 1
