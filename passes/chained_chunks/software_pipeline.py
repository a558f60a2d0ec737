"""The order of a region's tasks where equal regions follow each other in a line.

What a region hands on in parts (passes/parts_graph.py) the next one takes part by part, so the end
of one runs beside the beginning of the next: while the last collective of one is on its way, the
next begins with the part that is there. A *period* is what runs from the beginning of one region to
that of the next: its own tasks, and between them, in their own order, those that the region before
has left, its *tail*. It names no neighbour, and one period serves the whole line.

    1. several equal regions, one behind the other, are list-scheduled as one (list_schedule.py), by
       two rules; where one of them begins, the tasks of the one before that are still to come are
       the tail, and what runs until the next one begins is a period
    2. in the faster of these, task by task in its order, each goes where the line is fastest for
       it, to the tail or out of it, as long as anything is gained
    3. the best is taken if the line is faster with it than with every region for itself

Tail tasks hold what gradients of weights wait for like others, within the same bound.

(Loop pipelining: Lam, Software pipelining, PLDI 1988; Chao, LaPaugh and Sha, Rotation scheduling,
DAC 1993.)
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from meshfold.passes.schedule.list_schedule import (
    Task,
    list_order,
    listed_order,
    most_held_bytes,
    rounded_s,
)

NEXT = -1
"""In an order: the next task of the tail of the region before, if one is left."""

COPIES = 4
"""Regions that are ordered, and timed, one behind the other."""

Period = tuple[tuple[int, bool], ...]
"""(task, whether it is in the tail, and so of the region before)."""


@dataclass(frozen=True)
class Border:
    """Between equal regions in line. handed: (task that makes a part, task that takes it). early:
    tasks that may not be left to the next region, as what they make is wanted elsewhere. ahead: a
    floating start of what the next region waits for with its task `awaits`; it stands behind the
    tail of the region before, and not in its own: -1 for none."""

    handed: tuple[tuple[int, int], ...]
    early: frozenset[int] = frozenset()
    ahead: int = -1
    awaits: int = -1


@dataclass(frozen=True)
class LineOrder:
    """order: tasks, and NEXT. tail: how many of the last ones the next region runs. seconds: of
    COPIES regions in line."""

    order: tuple[int, ...]
    tail: int = 0
    seconds: float = field(default=0.0, compare=False)


LineOrders = dict[tuple[tuple[Task, ...], Border, int], LineOrder]
"""What was found, by everything that it depends on: who tries parts of one region after those of
another asks for the same lines again."""


def line_order(
    tasks: Sequence[Task], border: Border, bound_bytes: int, known: LineOrders | None = None
) -> LineOrder:
    """The order of `tasks`, which stand as passes.list_schedule.list_order wants them. known: what
    was found before, to which this is added."""
    key = tuple(tasks), border, bound_bytes
    if known is None:
        return _line_order(*key)
    if key not in known:
        known[key] = _line_order(*key)
    return known[key]


def _line_order(tasks: Sequence[Task], border: Border, bound_bytes: int) -> LineOrder:
    line = _Line(tasks, border)
    alone = tuple((t, False) for t in list_order(tasks, bound_bytes))
    bound_bytes = max(bound_bytes, line.held_bytes(alone))
    listed = [line.listed(bound_bytes, feeds_links=feeds) for feeds in (False, True)]
    fitting = [p for p in listed if p is not None and line.held_bytes(p) <= bound_bytes]
    found = [line.improved(min(fitting, key=line.seconds), bound_bytes)] if fitting else []
    best = min([alone, *found], key=line.seconds)
    tail = tuple(t for t, is_left in best if is_left)
    own = [t for t, is_left in best if not is_left]
    begins = [NEXT if is_left else t for t, is_left in best]
    order = (*begins, *tail) if tail else tuple(own)
    return LineOrder(order, len(tail), line.seconds(best))


class _Line:
    """COPIES of a region with these tasks."""

    def __init__(self, tasks: Sequence[Task], border: Border) -> None:
        self.tasks = tasks
        self.border = border
        self.count = len(tasks)
        self.takers: list[list[int]] = [[] for _ in tasks]
        self.givers: list[list[int]] = [[] for _ in tasks]
        for giver, taker in border.handed:
            self.takers[giver].append(taker)
            self.givers[taker].append(giver)
        self.users: list[list[int]] = [[] for _ in tasks]
        for t, task in enumerate(tasks):
            for n in task.needs:
                self.users[n].append(t)
        self.own = {*self._with_needs(border.early), border.ahead}
        """What is never in the tail."""
        self.placed = [t for t, task in enumerate(tasks) if task.floats or t == border.ahead]
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
        """The tasks of all copies. None begins before the one before it has handed on a part, and
        the one before that is over."""
        first = min((givers for givers in self.givers if givers), key=max, default=[])
        everything = [t for t in range(self.count) if t not in self.placed]
        line = []
        for copy in range(COPIES):
            own = copy * self.count
            for t, task in enumerate(self.tasks):
                needs = [own + n for n in task.needs]
                if copy:
                    handed = [*self.givers[t], *(() if task.needs else first)]
                    needs += [own - self.count + g for g in handed]
                if copy > 1 and not task.needs:
                    needs += [own - 2 * self.count + n for n in everything]
                start = task.start + own if task.start >= 0 else -1
                line.append(replace(task, needs=tuple(sorted(set(needs))), start=start))
        return line

    def listed(self, bound_bytes: int, *, feeds_links: bool) -> Period | None:
        """The period of a list schedule; None where three regions would overlap."""
        fixed = [t for t in range(len(self.copies)) if t % self.count not in self.placed]
        order = listed_order(self.copies, fixed, bound_bytes, feeds_links=feeds_links)
        of = [divmod(t, self.count) for t in order]
        at = {pair: k for k, pair in enumerate(of)}
        begins = next(k for k, (copy, _) in enumerate(of) if copy == 2)
        own = [t for copy, t in of if copy == 1]
        tail = [t for t in own if at[1, t] > begins and t not in self.own]
        ends = max((at[1, t] for t in tail), default=begins - 1)
        head = [(t, copy == 1) for copy, t in of[begins : ends + 1] if copy == 2 or t in tail]
        begun = {t for t, is_left in head if not is_left}
        if not begun.isdisjoint(tail):
            return None
        rest = [(t, False) for t in own if t not in begun and t not in tail]
        period = (*head, *rest)
        for t in self.placed:
            period = min(self._places(period, t), key=self.seconds)
        return period

    # The second step.

    def improved(self, period: Period, bound_bytes: int) -> Period:
        best_s, before_s = self.seconds(period), float("inf")
        while best_s < before_s:
            before_s = best_s
            for t in [t for t, _ in period]:
                rest = tuple(pair for pair in period if pair[0] != t)
                for place in self._places(rest, t):
                    seconds = self.seconds(place)
                    if seconds < best_s and self.held_bytes(place) <= bound_bytes:
                        best_s, period = seconds, place
        return period

    def _places(self, period: Period, t: int) -> Iterator[Period]:
        """`period` with task `t` everywhere where it may be."""
        at = {other: (k, is_left) for k, (other, is_left) in enumerate(period)}
        for is_left in (False, True):
            if is_left and t in self.own:
                continue
            for k in self._allowed(at, t, is_left):
                yield (*period[:k], (t, is_left), *period[k:])

    def _allowed(self, at: dict[int, tuple[int, bool]], t: int, is_left: bool) -> range:
        """The places for `t` among the tasks at `at`, in the tail or not: what is in the tail runs
        a period later."""
        first, last = 0, len(at)
        for n in self.tasks[t].needs:
            if n in at and at[n][1] == is_left:
                first = max(first, at[n][0] + 1)
            elif n in at and at[n][1]:
                return range(0)
        for user in self.users[t]:
            if user in at and at[user][1] == is_left:
                last = min(last, at[user][0])
            elif user in at and is_left:
                return range(0)
        for giver in self.givers[t]:
            if giver in at and at[giver][1] and not is_left:
                first = max(first, at[giver][0] + 1)
        for taker in self.takers[t]:
            if taker in at and is_left and not at[taker][1]:
                last = min(last, at[taker][0])
        if t == self.border.ahead:
            first = max([first, *(k + 1 for k, is_late in at.values() if is_late)])
        elif is_left and self.border.ahead in at:
            last = min(last, at[self.border.ahead][0])
        return range(first, last + 1)

    # What a period is worth.

    @cached_property
    def _rows(self) -> list[tuple[int, float, float, int]]:
        """Per task its link by number, -1 for none, its seconds there, those of its kernels, and
        how many tasks further in line what it waits for is started, 0 for none."""
        links = sorted({task.link for task in self.tasks} - {""})
        rows = []
        for t, task in enumerate(self.tasks):
            start = task.start if task.start >= 0 else t
            if t == self.border.awaits and self.border.ahead >= 0:
                start = self.border.ahead - self.count
            link = links.index(task.link) if task.link else -1
            rows.append((link, task.transfer_s, task.seconds, start - t))
        return rows

    def seconds(self, period: Period) -> float:
        """Until all copies have run and everything has come."""
        rows, count = self._rows, self.count
        now_s, free_s = 0.0, [0.0] * len(rows)
        # Before the first copy one that has come.
        ends_s = [0.0] * (count * (COPIES + 1))
        for copy in range(COPIES + 1):
            for t, is_left in period:
                if copy == (0 if is_left else COPIES):
                    continue
                link, transfer_s, seconds, start = rows[t]
                at = (copy - is_left + 1) * count + t
                if start and ends_s[at + start] > now_s:
                    now_s = ends_s[at + start]
                now_s += seconds
                if link >= 0:
                    ends_s[at] = free_s[link] = max(now_s, free_s[link]) + transfer_s
        return rounded_s(max(now_s, *free_s))

    def held_bytes(self, period: Period) -> int:
        """The most that is held for gradients of weights at a time."""
        order = [
            (copy - is_left) * self.count + t
            for copy in range(COPIES + 1)
            for t, is_left in period
            if 0 <= copy - is_left < COPIES
        ]
        return most_held_bytes(self.copies, order)
