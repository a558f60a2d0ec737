"""List scheduling of the tasks of one region on one compute stream and one queue per link.

Greedy, at the time that a simulation with the cost model gives:

    1. a collective that can be started is started
    2. of the kernels that need nothing any more, those run that have most behind them, collectives
       included; a collective is waited for when it is done, or when nothing else is left to run
    3. waits then sink to the first task that needs them
    4. what nobody waits for (gradients of weights) is deferred to a later wait, where that is
       better: the first collective that it could hide may be shorter than the next

so that fills the time in which collectives are in flight. A deferred task keeps memory alive until
it runs, at most `bound_bytes` at a time: with a smaller bound more of it runs at once, with none
each runs where it would without a schedule.

Collectives that belong to other regions (gathers of the next one's parameters, reductions of
gradients) go where they are least in the way of the region's own, on the same link: every position
is tried. The order as given stays where none is better. Ties go to the task given first, so all
ranks find the same order.

(List scheduling: Graham, Bounds on multiprocessing timing anomalies, 1969.)
"""

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Task:
    """needs: numbers of the tasks before it. seconds: of kernels; of a start before it, of a wait
    behind it. A start has a link, and the seconds of its collective there; a wait names its start
    in `start`. deferred_bytes: alive from when `needs` have run until it has. floats: a start that
    may move, for another region; is_due: what it brings is needed as soon as the region is over.
    """

    needs: tuple[int, ...] = ()
    seconds: float = 0.0
    link: str = ""
    transfer_s: float = 0.0
    start: int = -1
    deferred_bytes: int = 0
    floats: bool = False
    is_due: bool = False


MOST_WAITS = 32
"""Waits before which a deferred task is tried. Chosen: chained layers of language models have no
more, one of hundreds of ops has ten times as many, each of which costs a run through all tasks."""


def list_order(tasks: Sequence[Task], bound_bytes: int) -> tuple[int, ...]:
    """Numbers of `tasks` in the order in which they run.

    The tasks as given are in a legal order, and one that keeps no more memory than it must.
    """
    given = tuple(range(len(tasks)))
    fixed = [t for t in given if not tasks[t].floats]
    listed = listed_order(tasks, fixed, bound_bytes)
    found = [_placed(tasks, order) for order in (tuple(fixed), listed)]
    return min((given, *found), key=lambda order: _finish_times(tasks, order))


def listed_order(
    tasks: Sequence[Task], fixed: Sequence[int], bound_bytes: int, *, feeds_links: bool = False
) -> tuple[int, ...]:
    """Steps 1 to 4, for the tasks `fixed`. feeds_links: in step 2, of the kernels those that have
    least before the next collective can start, and only then most behind them."""
    listed = _sunk(tasks, _Lister(tasks, fixed, bound_bytes, feeds_links=feeds_links).order())
    return _deferred(tasks, listed, bound_bytes)


def span_s(tasks: Sequence[Task], order: Sequence[int]) -> float:
    """Seconds until all kernels have run and what is due has come, in `order`."""
    return _finish_times(tasks, order)[0]


def _finish_times(tasks: Sequence[Task], order: Sequence[int]) -> tuple[float, float, float]:
    """(seconds as span_s, seconds until all kernels have run, and until the last collective is
    done)."""
    now_s, free_s, ends_s = 0.0, dict[str, float](), dict[int, float]()
    for t in order:
        task = tasks[t]
        if task.start >= 0:
            now_s = max(now_s, ends_s[task.start])
        now_s += task.seconds
        if task.link:
            ends_s[t] = max(now_s, free_s.get(task.link, 0.0)) + task.transfer_s
            free_s[task.link] = ends_s[t]
    due = [end_s for t, end_s in ends_s.items() if tasks[t].is_due]
    last_s = max([now_s, *ends_s.values()])
    return rounded_s(max([now_s, *due])), rounded_s(now_s), rounded_s(last_s)


def rounded_s(seconds: float) -> float:
    """So that the order of additions decides nothing."""
    return float(f"{seconds:.9e}")


class _Lister:
    """The greedy part, over the tasks `fixed`."""

    def __init__(
        self, tasks: Sequence[Task], fixed: Sequence[int], bound_bytes: int, *, feeds_links: bool
    ) -> None:
        self.tasks = tasks
        self.left = list(fixed)
        self.rank = {t: k for k, t in enumerate(fixed)}
        self.missing = {t: len(set(tasks[t].needs)) for t in fixed}
        """How many of its needs have not run."""
        self.ready = [t for t in fixed if not self.missing[t]]
        """What can run, in the order as given."""
        self.bound_bytes = bound_bytes
        self.users: dict[int, list[int]] = {t: [] for t in fixed}
        for t in fixed:
            for n in tasks[t].needs:
                if n in self.users:
                    self.users[n].append(t)
        self.behind_s = self._behind()
        self.feeds_s = self._before_starts() if feeds_links else dict.fromkeys(fixed, 0.0)
        self.done: set[int] = set()
        self.now_s = 0.0
        self.free_s: dict[str, float] = {}
        self.ends_s: dict[int, float] = {}

    def order(self) -> tuple[int, ...]:
        found: list[int] = []
        while len(found) < len(self.left):
            t = self._next()
            self._run(t)
            self.ready.remove(t)
            self.done.add(t)
            for user in set(self.users[t]):
                self.missing[user] -= 1
                if not self.missing[user]:
                    insort(self.ready, user, key=self.rank.__getitem__)
            found.append(t)
        return tuple(found)

    def _behind(self) -> dict[int, float]:
        """The longest way from the beginning of each task to the end."""
        behind: dict[int, float] = {}
        for t in reversed(self.left):
            task = self.tasks[t]
            own_s = task.seconds + task.transfer_s
            behind[t] = own_s + max((behind[u] for u in self.users[t]), default=0.0)
        return behind

    def _before_starts(self) -> dict[int, float]:
        """The least seconds of kernels from the beginning of each task to a start."""
        before: dict[int, float] = {}
        for t in reversed(self.left):
            task = self.tasks[t]
            next_s = min((before[u] for u in self.users[t]), default=math.inf)
            before[t] = rounded_s(task.seconds + (0.0 if task.link else next_s))
        return before

    def _next(self) -> int:
        ready = self.ready
        start = next((t for t in ready if self.tasks[t].link), None)
        if start is not None:
            return start
        deferred = [t for t in ready if self.tasks[t].deferred_bytes]
        waits = [t for t in ready if self.tasks[t].start >= 0]
        kernels = [t for t in ready if self.tasks[t].start < 0]
        arrived = [t for t in waits if self.ends_s[self.tasks[t].start] <= self.now_s]
        if not kernels and not arrived:
            return min(waits, key=lambda t: (self.ends_s[self.tasks[t].start], t))
        best = min([*kernels, *arrived], key=lambda t: (self.feeds_s[t], -self.behind_s[t], t))
        if not deferred:
            return best
        deferred_bytes = sum(self.tasks[t].deferred_bytes for t in deferred) + self._adds(best)
        return deferred[0] if deferred_bytes > self.bound_bytes else best

    def _adds(self, t: int) -> int:
        """Bytes that stay alive when t has run and were not before."""
        freed = [u for u in self.users[t] if self.missing[u] == 1]
        return sum(self.tasks[u].deferred_bytes for u in freed) - self.tasks[t].deferred_bytes

    def _run(self, t: int) -> None:
        task = self.tasks[t]
        if task.start >= 0:
            self.now_s = max(self.now_s, self.ends_s[task.start])
        self.now_s += task.seconds
        if task.link:
            self.ends_s[t] = max(self.now_s, self.free_s.get(task.link, 0.0)) + task.transfer_s
            self.free_s[task.link] = self.ends_s[t]


def _sunk(tasks: Sequence[Task], order: Sequence[int]) -> tuple[int, ...]:
    """Every wait right before the first task that needs it."""
    found = list(order)
    for t in reversed(order):
        if tasks[t].start < 0:
            continue
        at = found.index(t)
        users = [k for k in range(at + 1, len(found)) if t in tasks[found[k]].needs]
        del found[at]
        found.insert(users[0] - 1 if users else len(found), t)
    return tuple(found)


def _deferred(tasks: Sequence[Task], order: Sequence[int], bound_bytes: int) -> tuple[int, ...]:
    """`order` with every deferred task before the wait (of MOST_WAITS), or at the end, where it
    costs least, the earliest such position; no more memory is kept than before, or than
    `bound_bytes`."""
    found = tuple(order)
    total_bytes = sum(task.deferred_bytes for task in tasks)
    bound_bytes = max(bound_bytes, most_deferred_bytes(tasks, found))
    for t in [t for t in order if tasks[t].deferred_bytes]:
        first = found.index(t)
        rest = (*found[:first], *found[first + 1 :])
        users = [k for k, u in enumerate(rest) if t in tasks[u].needs]
        last = min([len(rest), *users])
        waits = [k for k in range(first, last) if tasks[rest[k]].start >= 0]
        if len(waits) > MOST_WAITS:
            waits = [waits[k * len(waits) // MOST_WAITS] for k in range(MOST_WAITS)]
        orders = [(*rest[:k], t, *rest[k:]) for k in (*waits, last)]
        allowed = orders
        if total_bytes > bound_bytes:
            allowed = [p for p in orders if most_deferred_bytes(tasks, p) <= bound_bytes]
        found = min([found, *allowed], key=lambda order: _finish_times(tasks, order))
    return found


def most_deferred_bytes(tasks: Sequence[Task], order: Sequence[int]) -> int:
    """The most bytes of tasks that could have run, while others run or are waited for; starts take
    no time."""
    position = {t: k for k, t in enumerate(order)}
    added = [0] * (len(order) + 1)
    for t in order:
        num_bytes = tasks[t].deferred_bytes
        added[max((position[n] + 1 for n in tasks[t].needs), default=0)] += num_bytes
        added[position[t]] -= num_bytes
    pairs = zip(order, accumulate(added), strict=False)
    return max((num_bytes for t, num_bytes in pairs if not tasks[t].link), default=0)


def _placed(tasks: Sequence[Task], order: Sequence[int]) -> tuple[int, ...]:
    """`order` with the floating starts where they cost least, the earliest such position."""
    found = tuple(order)
    for t, task in enumerate(tasks):
        if not task.floats:
            continue
        first = max((found.index(n) + 1 for n in task.needs), default=0)
        orders = [(*found[:k], t, *found[k:]) for k in range(first, len(found) + 1)]
        found = min(orders, key=lambda order: _finish_times(tasks, order))
    return found
