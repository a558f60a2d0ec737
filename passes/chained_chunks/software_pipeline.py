"""The order of a region's tasks where equal regions follow each other in a chain.

The next region reads chunk by chunk what a region sends in chunks (passes/split/chunk_graph.py),
so the end of one runs beside the beginning of the next: while the last collective of one is in
flight, the next begins with the chunk that is there. An *initiation interval* is what runs from the
beginning of one region to that of the next: its own tasks, and between them, in their own order,
those that the region before has left, its *epilogue*. It names no neighbour, and one interval
serves the whole chain.

    1. several equal regions, one behind the other, are list-scheduled as one (list_schedule.py), by
       two rules; where one of them begins, the tasks of the one before that are still to come are
       the epilogue, and what runs until the next one begins is an interval
    2. in the faster of these, task by task in its order, each goes where the chain is fastest for
       it, to the epilogue or out of it, as long as anything is gained
    3. the best is taken if the chain is faster with it than with every region for itself

Tasks of the epilogue keep what deferred gradients wait for like others, within the same bound.

(Loop pipelining: Lam, Software pipelining, PLDI 1988; Chao, LaPaugh and Sha, Rotation scheduling,
DAC 1993.)
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from meshfold.passes.schedule.list_schedule import (
    Task,
    list_order,
    listed_order,
    most_deferred_bytes,
    rounded_s,
)

NEXT = -1
"""Stands in an order for the next task of the epilogue of the region before, if one is left."""

MOST_STEPS = 2**20
"""Tasks run in all intervals that are tried to better one. Chosen: layers of language models need
less, half a second; a region of hundreds of ops would take minutes."""

COPIES = 4
"""Regions that are ordered, and timed, one behind the other."""

Interval = tuple[tuple[int, bool], ...]
"""(task, whether it is in the epilogue, and so of the region before)."""


@dataclass(frozen=True)
class ChainBoundary:
    """The boundary between equal regions of a chain."""

    sent: tuple[tuple[int, int], ...]
    """(task that computes a chunk, task that reads it)."""
    early: frozenset[int] = frozenset()
    """Tasks that may not be left to the next region, as others want what they compute."""
    prefetch: int = -1
    """A floating start of what the next region waits for, -1 for none. It stands behind the
    epilogue of the region before, and not in its own."""
    awaits: int = -1
    """The task that waits for it in the next region."""


@dataclass(frozen=True)
class ChainedOrder:
    """Tasks of a region, and NEXT."""

    order: tuple[int, ...]
    num_epilogue: int = 0
    """How many of the last ones the next region runs."""
    seconds: float = field(default=0.0, compare=False)
    """The time of COPIES regions in a chain."""


ChainedOrders = dict[tuple[tuple[Task, ...], ChainBoundary, int], ChainedOrder]
"""What was found, by everything that it depends on: who tries micro-chunks of one region after
those of another asks for the same chains twice."""


def chained_order(
    tasks: Sequence[Task],
    boundary: ChainBoundary,
    bound_bytes: int,
    known: ChainedOrders | None = None,
) -> ChainedOrder:
    """The order of `tasks`, which stand as list_order wants them. known: what
    was found before, to which this is added."""
    key = tuple(tasks), boundary, bound_bytes
    if known is None:
        return _chained_order(*key)
    if key not in known:
        known[key] = _chained_order(*key)
    return known[key]


def _chained_order(
    tasks: Sequence[Task], boundary: ChainBoundary, bound_bytes: int
) -> ChainedOrder:
    chain = _Chain(tasks, boundary)
    alone = tuple((t, False) for t in list_order(tasks, bound_bytes))
    bound_bytes = max(bound_bytes, chain.saved_bytes(alone))
    listed = [chain.listed(bound_bytes, feeds_links=feeds) for feeds in (False, True)]
    fitting = [p for p in listed if p is not None and chain.saved_bytes(p) <= bound_bytes]
    found = [chain.improved(min(fitting, key=chain.seconds), bound_bytes)] if fitting else []
    best = min([alone, *found], key=chain.seconds)
    epilogue = tuple(t for t, is_epilogue in best if is_epilogue)
    own = [t for t, is_epilogue in best if not is_epilogue]
    begins = [NEXT if is_epilogue else t for t, is_epilogue in best]
    order = (*begins, *epilogue) if epilogue else tuple(own)
    return ChainedOrder(order, len(epilogue), chain.seconds(best))


class _Chain:
    """COPIES of a region with these tasks."""

    def __init__(self, tasks: Sequence[Task], boundary: ChainBoundary) -> None:
        self.tasks = tasks
        self.boundary = boundary
        self.count = len(tasks)
        self.readers: list[list[int]] = [[] for _ in tasks]
        self.senders: list[list[int]] = [[] for _ in tasks]
        for sender, reader in boundary.sent:
            self.readers[sender].append(reader)
            self.senders[reader].append(sender)
        self.users: list[list[int]] = [[] for _ in tasks]
        for t, task in enumerate(tasks):
            for n in task.needs:
                self.users[n].append(t)
        self.own = {*self._with_needs(boundary.early), boundary.prefetch}
        """What is never in the epilogue."""
        self.placed = [t for t, task in enumerate(tasks) if task.floats or t == boundary.prefetch]
        """What is not listed, but put where it costs least."""

    def _with_needs(self, found: Iterable[int]) -> set[int]:
        """Tasks, and all that must run before them."""
        known: set[int] = set()
        left = list(found)
        while left:
            t = left.pop()
            if t not in known:
                known.add(t)
                left += self.tasks[t].needs
        return known

    # The first step.

    @cached_property
    def copies(self) -> list[Task]:
        """The tasks of all copies. None begins before the one before it has sent a chunk, and
        the one before that is over."""
        first = min((senders for senders in self.senders if senders), key=max, default=[])
        everything = [t for t in range(self.count) if t not in self.placed]
        chain = []
        for copy in range(COPIES):
            own = copy * self.count
            for t, task in enumerate(self.tasks):
                needs = [own + n for n in task.needs]
                if copy:
                    sent = [*self.senders[t], *(() if task.needs else first)]
                    needs += [own - self.count + g for g in sent]
                if copy > 1 and not task.needs:
                    needs += [own - 2 * self.count + n for n in everything]
                start = task.start + own if task.start >= 0 else -1
                chain.append(replace(task, needs=tuple(sorted(set(needs))), start=start))
        return chain

    def listed(self, bound_bytes: int, *, feeds_links: bool) -> Interval | None:
        """The interval of a list schedule; None where three regions would overlap."""
        fixed = [t for t in range(len(self.copies)) if t % self.count not in self.placed]
        order = listed_order(self.copies, fixed, bound_bytes, feeds_links=feeds_links)
        of = [divmod(t, self.count) for t in order]
        at = {pair: k for k, pair in enumerate(of)}
        begins = next(k for k, (copy, _) in enumerate(of) if copy == 2)
        own = [t for copy, t in of if copy == 1]
        epilogue = [t for t in own if at[1, t] > begins and t not in self.own]
        ends = max((at[1, t] for t in epilogue), default=begins - 1)
        head = [(t, copy == 1) for copy, t in of[begins : ends + 1] if copy == 2 or t in epilogue]
        begun = {t for t, is_epilogue in head if not is_epilogue}
        if not begun.isdisjoint(epilogue):
            return None
        rest = [(t, False) for t in own if t not in begun and t not in epilogue]
        interval = (*head, *rest)
        for t in self.placed:
            interval = min(self._insertions(interval, t), key=self.seconds)
        return interval

    # The second step.

    def improved(self, interval: Interval, bound_bytes: int) -> Interval:
        """`interval` with one task after the other moved to where it costs least, until no move
        helps or MOST_STEPS are done."""
        best_s, before_s, num_left = self.seconds(interval), float("inf"), MOST_STEPS // self.count
        while best_s < before_s:
            before_s = best_s
            for t in [t for t, _ in interval]:
                rest = tuple(pair for pair in interval if pair[0] != t)
                for inserted in self._insertions(rest, t):
                    num_left -= 1
                    if num_left < 0:
                        return interval
                    seconds = self.seconds(inserted, best_s)
                    if seconds < best_s and self.saved_bytes(inserted) <= bound_bytes:
                        best_s, interval = seconds, inserted
        return interval

    def _insertions(self, interval: Interval, t: int) -> Iterator[Interval]:
        """`interval` with task `t` everywhere where it may be."""
        at = {other: (k, is_epilogue) for k, (other, is_epilogue) in enumerate(interval)}
        for is_epilogue in (False, True):
            if is_epilogue and t in self.own:
                continue
            for k in self._allowed(at, t, is_epilogue):
                yield (*interval[:k], (t, is_epilogue), *interval[k:])

    def _allowed(self, at: dict[int, tuple[int, bool]], t: int, is_epilogue: bool) -> range:
        """The positions for `t` among the tasks at `at`, in the epilogue or not: what is in it
        runs an interval later."""
        first, last = 0, len(at)
        for n in self.tasks[t].needs:
            if n in at and at[n][1] == is_epilogue:
                first = max(first, at[n][0] + 1)
            elif n in at and at[n][1]:
                return range(0)
        for user in self.users[t]:
            if user in at and at[user][1] == is_epilogue:
                last = min(last, at[user][0])
            elif user in at and is_epilogue:
                return range(0)
        for sender in self.senders[t]:
            if sender in at and at[sender][1] and not is_epilogue:
                first = max(first, at[sender][0] + 1)
        for reader in self.readers[t]:
            if reader in at and is_epilogue and not at[reader][1]:
                last = min(last, at[reader][0])
        if t == self.boundary.prefetch:
            first = max([first, *(k + 1 for k, is_epilogue in at.values() if is_epilogue)])
        elif is_epilogue and self.boundary.prefetch in at:
            last = min(last, at[self.boundary.prefetch][0])
        return range(first, last + 1)

    # What an interval is worth.

    @cached_property
    def _rows(self) -> list[tuple[int, float, float, int]]:
        """Every task's link by number, -1 for none, its seconds there, those of its kernels, and
        how many tasks further in chain what it waits for is started, 0 for none."""
        links = sorted({task.link for task in self.tasks} - {""})
        rows = []
        for t, task in enumerate(self.tasks):
            start = task.start if task.start >= 0 else t
            if t == self.boundary.awaits and self.boundary.prefetch >= 0:
                start = self.boundary.prefetch - self.count
            link = links.index(task.link) if task.link else -1
            rows.append((link, task.transfer_s, task.seconds, start - t))
        return rows

    @cached_property
    def _kernels_s(self) -> float:
        """Seconds of the kernels of one copy."""
        return sum(task.seconds for task in self.tasks)

    def seconds(self, interval: Interval, beat_s: float = math.inf) -> float:
        """Seconds until all copies have run and everything has arrived; infinite as soon as it is
        clear that they are not fewer than beat_s."""
        rows, count = self._rows, self.count
        whole = [(t - is_epilogue * count, is_epilogue, *rows[t]) for t, is_epilogue in interval]
        # The first copy runs no epilogue, and the last epilogue runs alone.
        first = [row for row in whole if not row[1]]
        last = [row for row in whole if row[1]]
        now_s, free_s = 0.0, [0.0] * count
        # Before the first copy one that has come.
        ends_s = [0.0] * (count * (COPIES + 1))
        last_s = sum(row[4] for row in last)
        beat_s *= 1 + 1e-9  # more than sums of seconds are rounded by
        for copy in range(COPIES + 1):
            own = (copy + 1) * count
            for number, _, link, transfer_s, seconds, start in (
                whole if 0 < copy < COPIES else last if copy else first
            ):
                at = own + number
                if start and ends_s[at + start] > now_s:
                    now_s = ends_s[at + start]
                now_s += seconds
                if link >= 0:
                    begin_s = free_s[link]
                    if now_s > begin_s:
                        begin_s = now_s
                    ends_s[at] = free_s[link] = begin_s + transfer_s
            left = COPIES - 1 - copy
            if left >= 0 and now_s + left * self._kernels_s + last_s > beat_s:
                return math.inf
        return rounded_s(max(now_s, *free_s))

    def saved_bytes(self, interval: Interval) -> int:
        """The most bytes that deferred weight gradients keep alive at a time."""
        order = [
            (copy - is_epilogue) * self.count + t
            for copy in range(COPIES + 1)
            for t, is_epilogue in interval
            if 0 <= copy - is_epilogue < COPIES
        ]
        return most_deferred_bytes(self.copies, order)
