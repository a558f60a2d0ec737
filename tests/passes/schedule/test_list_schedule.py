"""List scheduling: legal orders, no worse than what was given, memory within its bound."""

import itertools
from collections.abc import Sequence
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from meshfold.passes.schedule import list_schedule
from meshfold.passes.schedule.list_schedule import Task, list_order, span_s


def most_deferred_bytes(tasks: Sequence[Task], order: Sequence[int]) -> int:
    """The most that tasks hold which could have run, while others run."""
    most, done = 0, set[int]()
    for t in order:
        waiting = [w for w, task in enumerate(tasks) if w not in done and w != t]
        held = [tasks[w].deferred_bytes for w in waiting if done.issuperset(tasks[w].needs)]
        most = max(most, sum(held))
        done.add(t)
    return most


BACKWARD = (
    Task(seconds=4),  # 0: the backward of a piece
    Task((0,), seconds=3, deferred_bytes=10),  # 1: its weights
    Task((0,), link="node", transfer_s=3),  # 2: what it hands on is reduced
    Task((2,), start=2),  # 3
    Task((3,), seconds=2),  # 4: the next piece
)


def test_gradients_of_weights_run_while_a_collective_is_on_its_way() -> None:
    order = list_order(BACKWARD, bound_bytes=10)
    assert order == (0, 2, 1, 3, 4)
    # By hand: 4, then 3 of kernels beside 3 of link, then 2.
    assert span_s(BACKWARD, order) == 9
    # As given nothing hides: 4 + 3 + 3 + 2.
    assert span_s(BACKWARD, range(5)) == 12


def test_the_longest_collective_gets_what_there_is_to_hide_it() -> None:
    """A short collective comes first, on another link."""
    tasks = (
        Task(seconds=4),  # 0: experts
        Task((0,), seconds=6, deferred_bytes=10),  # 1: their weights
        Task((0,), link="node", transfer_s=1),  # 2
        Task((2,), start=2),  # 3
        Task((3,), link="cluster", transfer_s=6),  # 4: rows come home
        Task((4,), start=4),  # 5
        Task((5,), seconds=1),  # 6
    )
    order = list_order(tasks, bound_bytes=10)
    assert order == (0, 2, 3, 4, 1, 5, 6)
    assert span_s(tasks, order) == 4 + 1 + 6 + 1
    # Nothing may be held: behind the short one.
    assert span_s(tasks, list_order(tasks, bound_bytes=0)) == 4 + 6 + 6 + 1


def test_a_smaller_bound_puts_off_less_step_by_step() -> None:
    """Three segments, each with weights; the bound decides how many are deferred."""
    tasks = [Task()]
    for _ in range(3):
        first = len(tasks)
        tasks += [
            Task((first - 1,), seconds=1),
            Task((first,), seconds=1, deferred_bytes=10),
            Task((first,), link="node", transfer_s=3),
            Task((first + 2,), start=first + 2),
        ]
    found = [list_order(tasks, bound) for bound in (0, 10, 30)]
    held = [most_deferred_bytes(tasks, order) for order in found]
    spans = [span_s(tasks, order) for order in found]
    assert held == sorted(held) and all(
        h <= max(10, b) for h, b in zip(held, (0, 10, 30), strict=True)
    )
    assert spans == sorted(spans, reverse=True)


def test_a_gather_for_the_next_region_keeps_out_of_the_way() -> None:
    """A long transfer at the start would hold up the short one that compute waits for; on a link of
    its own it goes first."""

    def tasks(link: str) -> tuple[Task, ...]:
        return (
            Task(seconds=1),
            Task((0,), link="node", transfer_s=1),
            Task((1,), start=1),
            Task((2,), seconds=8),
            Task(link=link, transfer_s=6, floats=True, is_due=True),
        )

    shared = list_order(tasks("node"), 0)
    assert shared.index(4) > shared.index(1)
    assert span_s(tasks("node"), shared) == 10
    assert span_s(tasks("node"), (4, 0, 1, 2, 3)) == 15
    assert list_order(tasks("network"), 0)[0] == 4


def test_waits_stand_where_their_result_is_needed() -> None:
    tasks = (Task(link="a", transfer_s=1), Task((0,), start=0), Task(seconds=5), Task((1,), 2))
    assert list_order(tasks, 0) == (0, 2, 1, 3)


@st.composite
def regions(draw: st.DrawFn) -> tuple[Task, ...]:
    """Random tasks, given in a legal order; starts are followed by their waits somewhere."""
    tasks: list[Task] = []
    open_starts: list[int] = []
    for _ in range(draw(st.integers(1, 7))):
        needs = tuple(sorted(draw(st.sets(st.integers(0, len(tasks) - 1)))) if tasks else ())
        kind = draw(st.sampled_from(["kernels", "start", "wait", "weights", "floats"]))
        seconds = float(draw(st.integers(0, 5)))
        if kind == "start":
            open_starts.append(len(tasks))
            tasks.append(Task(needs, link=draw(st.sampled_from("ab")), transfer_s=seconds))
        elif kind == "wait" and open_starts:
            start = open_starts.pop()
            tasks.append(Task((*sorted({*needs, start}),), start=start))
        elif kind == "weights":
            tasks.append(Task(needs, seconds, deferred_bytes=draw(st.integers(1, 9))))
        elif kind == "floats":
            link = draw(st.sampled_from("ab"))
            is_due = draw(st.booleans())
            tasks.append(Task((), link=link, transfer_s=seconds, floats=True, is_due=is_due))
        else:
            tasks.append(Task(needs, seconds))
    used = {n for t in tasks for n in t.needs}
    return tuple(t if not (t.floats and k in used) else Task() for k, t in enumerate(tasks))


def is_legal(tasks: tuple[Task, ...], order: tuple[int, ...]) -> bool:
    return all(order.index(n) < order.index(t) for t in order for n in tasks[t].needs)


@given(regions(), st.integers(0, 20), st.integers(1, 3))
def test_orders_are_legal_and_no_worse_than_given(
    tasks: tuple[Task, ...], bound: int, most_waits: int
) -> None:
    with mock.patch.object(list_schedule, "MOST_WAITS", most_waits):
        few = list_order(tasks, bound)
        assert sorted(few) == list(range(len(tasks))) and is_legal(tasks, few)
        assert span_s(tasks, few) <= span_s(tasks, range(len(tasks)))
    order = list_order(tasks, bound)
    assert sorted(order) == list(range(len(tasks))) and is_legal(tasks, order)
    assert span_s(tasks, order) <= span_s(tasks, range(len(tasks)))
    assert order == list_order(tasks, bound)


@given(regions())
def test_never_more_than_twice_the_best_order(tasks: tuple[Task, ...]) -> None:
    """Against every legal order: compute and links are each busy or waiting for one another."""
    orders = [o for o in itertools.permutations(range(len(tasks))) if is_legal(tasks, o)]
    best_s = min(span_s(tasks, order) for order in orders)
    assert best_s <= span_s(tasks, list_order(tasks, 1000)) <= 2 * best_s + 1e-9
