"""Orders of regions in line: what one leaves runs beside the beginning of the next."""

from hypothesis import given
from hypothesis import strategies as st

from meshfold.passes.chained_chunks.software_pipeline import (
    NEXT,
    Border,
    LineOrder,
    LineOrders,
    line_order,
)
from meshfold.passes.schedule.list_schedule import Task, list_order, span_s

TWO_PARTS = (
    Task(seconds=1),
    Task((0,), link="a", transfer_s=1),
    Task((1,), start=1),
    Task(seconds=1),
    Task((3,), link="a", transfer_s=1),
    Task((4,), start=4),
)
"""Two parts, each with kernels and a collective behind them."""
HANDED = ((2, 0), (5, 3))


def in_line(tasks: tuple[Task, ...], found: LineOrder, copies: int) -> list[tuple[int, int]]:
    """(region, task) in the order in which so many regions in line run, the last one to its end."""
    ends = len(found.order) - found.tail
    order: list[tuple[int, int]] = []
    left: list[tuple[int, int]] = []
    for copy in range(copies):
        for t in found.order[:ends]:
            if t != NEXT:
                order.append((copy, t))
            elif left:
                order.append(left.pop(0))
        order += left
        left = [(copy, t) for t in found.order[ends:]]
    return order + left


def seconds_in_line(tasks: tuple[Task, ...], found: LineOrder, copies: int) -> float:
    line = tuple(
        Task(
            seconds=task.seconds,
            link=task.link,
            transfer_s=task.transfer_s,
            start=task.start + copy * len(tasks) if task.start >= 0 else -1,
        )
        for copy in range(copies)
        for task in tasks
    )
    order = [copy * len(tasks) + t for copy, t in in_line(tasks, found, copies)]
    return span_s(line, order)


def test_the_last_collective_hides_behind_the_next_region() -> None:
    """Alone a region takes 3: one collective is waited for at its end."""
    alone = LineOrder(list_order(TWO_PARTS, 0))
    assert seconds_in_line(TWO_PARTS, alone, 10) == 30
    found = line_order(TWO_PARTS, Border(HANDED), 0)
    assert found.tail and found.order.count(NEXT) == found.tail
    assert seconds_in_line(TWO_PARTS, found, 10) == 21


def test_what_is_known_is_not_looked_for_again() -> None:
    known: LineOrders = {}
    found = line_order(TWO_PARTS, Border(HANDED), 0, known)
    assert found == line_order(TWO_PARTS, Border(HANDED), 0)
    assert line_order(list(TWO_PARTS), Border(HANDED), 0, known) is found
    # Another bound, and another border, are other questions.
    line_order(TWO_PARTS, Border(HANDED), 1, known)
    line_order(TWO_PARTS, Border(HANDED, frozenset({2})), 0, known)
    assert len(known) == 3


def test_what_is_wanted_elsewhere_is_not_left() -> None:
    found = line_order(TWO_PARTS, Border(HANDED, early=frozenset({5})), 0)
    assert found == LineOrder(list_order(TWO_PARTS, 0))


def test_gathers_ahead_start_behind_the_tail() -> None:
    """Two regions would be whole before, and a third on its way."""
    ahead = Task(link="b", transfer_s=1, floats=True, is_due=True)
    tasks = (*TWO_PARTS, ahead)
    found = line_order(tasks, Border(HANDED, ahead=6, awaits=0), 0)
    last = max(k for k, t in enumerate(found.order) if t == NEXT)
    assert last < found.order.index(6) < len(found.order) - found.tail


def test_gradients_of_weights_fill_the_next_region_within_the_bound() -> None:
    """A chain that waits for its collective, and a product that holds 10 bytes until it has run."""
    tasks = (
        Task(seconds=1),
        Task((0,), seconds=1, held_bytes=10),
        Task((0,), link="a", transfer_s=2),
        Task((2,), start=2),
    )
    found = line_order(tasks, Border(((3, 0),)), 10)
    assert seconds_in_line(tasks, found, 10) == 30
    tasks = (Task(seconds=1), Task((0,), link="a", transfer_s=1), Task((1,), start=1))
    tasks = (*tasks, Task((2,), seconds=1), Task((3,), seconds=1, held_bytes=10))
    border = Border(((3, 0),))
    assert seconds_in_line(tasks, line_order(tasks, border, 10), 10) == 31
    # With nothing held a product runs at once.
    assert seconds_in_line(tasks, line_order(tasks, border, 0), 10) == 40


@st.composite
def regions(draw: st.DrawFn) -> tuple[tuple[Task, ...], Border]:
    """Random regions of two parts, some of whose tasks depend on tasks of the other part."""
    tasks: list[Task] = []
    takers, givers = [], []
    for _ in range(2):
        takers.append(len(tasks))
        tasks.append(Task(seconds=float(draw(st.integers(0, 3)))))
        for _ in range(draw(st.integers(0, 3))):
            needs = {len(tasks) - 1, draw(st.integers(0, len(tasks) - 1))}
            seconds = float(draw(st.integers(0, 3)))
            if draw(st.booleans()):
                link = draw(st.sampled_from("ab"))
                tasks.append(Task(tuple(sorted(needs)), link=link, transfer_s=seconds))
                tasks.append(Task((len(tasks) - 1,), start=len(tasks) - 1))
            else:
                held = draw(st.integers(0, 3))
                tasks.append(Task(tuple(sorted(needs)), seconds, held_bytes=held))
        givers.append(len(tasks) - 1)
    ahead = -1
    if draw(st.booleans()):
        ahead = len(tasks)
        tasks.append(Task((0,), link="b", transfer_s=1.0, floats=True, is_due=True))
    early = draw(st.sets(st.integers(0, len(tasks) - 1), max_size=1)) - {ahead}
    handed = tuple(zip(givers, takers, strict=True))
    return tuple(tasks), Border(handed, frozenset(early), ahead, 0 if ahead >= 0 else -1)


@given(regions(), st.integers(0, 6))
def test_orders_in_line_are_legal(case: tuple[tuple[Task, ...], Border], bound: int) -> None:
    tasks, border = case
    found = line_order(tasks, border, bound)
    own = [t for t in found.order if t != NEXT]
    assert sorted(own) == list(range(len(tasks)))
    ends = len(found.order) - found.tail
    assert NEXT not in found.order[ends:] and found.order.count(NEXT) == found.tail
    assert border.early.isdisjoint(found.order[ends:])
    at = {pair: k for k, pair in enumerate(in_line(tasks, found, 3))}
    for (copy, t), k in at.items():
        assert all(at[copy, n] < k for n in tasks[t].needs)
        if copy:
            assert all(at[copy - 1, giver] < k for giver, taker in border.handed if taker == t)
    assert found == line_order(tasks, border, bound)
