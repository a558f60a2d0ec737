"""Orders of regions in line: what one leaves runs beside the beginning of the next."""

from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from meshfold.passes.chained_chunks import software_pipeline
from meshfold.passes.chained_chunks.software_pipeline import (
    NEXT,
    ChainBoundary,
    ChainedOrder,
    ChainedOrders,
    chained_order,
)
from meshfold.passes.schedule.list_schedule import Task, list_order, span_s

TWO_CHUNKS = (
    Task(seconds=1),
    Task((0,), link="a", transfer_s=1),
    Task((1,), start=1),
    Task(seconds=1),
    Task((3,), link="a", transfer_s=1),
    Task((4,), start=4),
)
"""Two parts, each with kernels and a collective behind them."""
SENT = ((2, 0), (5, 3))


def in_line(tasks: tuple[Task, ...], found: ChainedOrder, copies: int) -> list[tuple[int, int]]:
    """(region, task) in the order in which so many regions in line run, the last one to its end."""
    ends = len(found.order) - found.num_epilogue
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


def seconds_in_line(tasks: tuple[Task, ...], found: ChainedOrder, copies: int) -> float:
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
    alone = ChainedOrder(list_order(TWO_CHUNKS, 0))
    assert seconds_in_line(TWO_CHUNKS, alone, 10) == 30
    found = chained_order(TWO_CHUNKS, ChainBoundary(SENT), 0)
    assert found.num_epilogue and found.order.count(NEXT) == found.num_epilogue
    assert seconds_in_line(TWO_CHUNKS, found, 10) == 21


def test_what_is_known_is_not_looked_for_twice() -> None:
    known: ChainedOrders = {}
    found = chained_order(TWO_CHUNKS, ChainBoundary(SENT), 0, known)
    assert found == chained_order(TWO_CHUNKS, ChainBoundary(SENT), 0)
    assert chained_order(list(TWO_CHUNKS), ChainBoundary(SENT), 0, known) is found
    # Another bound, and another boundary, are other questions.
    chained_order(TWO_CHUNKS, ChainBoundary(SENT), 1, known)
    chained_order(TWO_CHUNKS, ChainBoundary(SENT, frozenset({2})), 0, known)
    assert len(known) == 3


def test_what_is_wanted_elsewhere_is_not_left() -> None:
    found = chained_order(TWO_CHUNKS, ChainBoundary(SENT, early=frozenset({5})), 0)
    assert found == ChainedOrder(list_order(TWO_CHUNKS, 0))


def test_gathers_ahead_start_behind_the_epilogue() -> None:
    """Two regions would be whole before, and a third on its way."""
    prefetch = Task(link="b", transfer_s=1, floats=True, is_due=True)
    tasks = (*TWO_CHUNKS, prefetch)
    found = chained_order(tasks, ChainBoundary(SENT, prefetch=6, awaits=0), 0)
    last = max(k for k, t in enumerate(found.order) if t == NEXT)
    assert last < found.order.index(6) < len(found.order) - found.num_epilogue


def test_gradients_of_weights_fill_the_next_region_within_the_bound() -> None:
    """A chain that waits for its collective, and a product that holds 10 bytes until it has run."""
    tasks = (
        Task(seconds=1),
        Task((0,), seconds=1, deferred_bytes=10),
        Task((0,), link="a", transfer_s=2),
        Task((2,), start=2),
    )
    found = chained_order(tasks, ChainBoundary(((3, 0),)), 10)
    assert seconds_in_line(tasks, found, 10) == 30
    tasks = (Task(seconds=1), Task((0,), link="a", transfer_s=1), Task((1,), start=1))
    tasks = (*tasks, Task((2,), seconds=1), Task((3,), seconds=1, deferred_bytes=10))
    boundary = ChainBoundary(((3, 0),))
    assert seconds_in_line(tasks, chained_order(tasks, boundary, 10), 10) == 31
    # With nothing held a product runs at once.
    assert seconds_in_line(tasks, chained_order(tasks, boundary, 0), 10) == 40


@st.composite
def regions(draw: st.DrawFn) -> tuple[tuple[Task, ...], ChainBoundary]:
    """Random regions of two parts, some of whose tasks depend on tasks of the other part."""
    tasks: list[Task] = []
    readers, senders = [], []
    for _ in range(2):
        readers.append(len(tasks))
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
                tasks.append(Task(tuple(sorted(needs)), seconds, deferred_bytes=held))
        senders.append(len(tasks) - 1)
    prefetch = -1
    if draw(st.booleans()):
        prefetch = len(tasks)
        tasks.append(Task((0,), link="b", transfer_s=1.0, floats=True, is_due=True))
    early = draw(st.sets(st.integers(0, len(tasks) - 1), max_size=1)) - {prefetch}
    sent = tuple(zip(senders, readers, strict=True))
    return tuple(tasks), ChainBoundary(sent, frozenset(early), prefetch, 0 if prefetch >= 0 else -1)


@given(regions(), st.integers(0, 6), st.sampled_from([0, 20, software_pipeline.MOST_STEPS]))
def test_orders_in_a_chain_are_legal(
    case: tuple[tuple[Task, ...], ChainBoundary], bound: int, most_steps: int
) -> None:
    tasks, boundary = case
    with mock.patch.object(software_pipeline, "MOST_STEPS", most_steps):
        found = chained_order(tasks, boundary, bound)
    own = [t for t in found.order if t != NEXT]
    assert sorted(own) == list(range(len(tasks)))
    ends = len(found.order) - found.num_epilogue
    assert NEXT not in found.order[ends:] and found.order.count(NEXT) == found.num_epilogue
    assert boundary.early.isdisjoint(found.order[ends:])
    at = {pair: k for k, pair in enumerate(in_line(tasks, found, 3))}
    for (copy, t), k in at.items():
        assert all(at[copy, n] < k for n in tasks[t].needs)
        if copy:
            assert all(at[copy - 1, sender] < k for sender, reader in boundary.sent if reader == t)


@given(regions(), st.integers(0, 6))
def test_more_steps_find_no_slower_chain(
    case: tuple[tuple[Task, ...], ChainBoundary], bound: int
) -> None:
    found = []
    for most_steps in (0, 20, 200, software_pipeline.MOST_STEPS):
        with mock.patch.object(software_pipeline, "MOST_STEPS", most_steps):
            found.append(chained_order(*case, bound).seconds)
    assert found == sorted(found, reverse=True)
    assert chained_order(*case, bound) == chained_order(*case, bound)
