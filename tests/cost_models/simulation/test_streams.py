"""Streams of one rank: cases worked out by hand, and what holds for any order of work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfold.cost_models.simulation.streams import Streams
from meshfold.ir.step_events import CollectiveEvent

NODE, NETWORK = "node", "network"


def moved(seconds: float, link: str = NODE, kind: str = "all_gather") -> CollectiveEvent:
    return CollectiveEvent(kind, ("dp",), link, 1, seconds)


def test_compute_and_a_collective_beside_it_slow_each_other_down() -> None:
    streams = Streams(slowdown=1.25)
    transfer = streams.start(moved(4.0))
    streams.compute(8.0)
    # 4 of each in 5, then 4 alone.
    assert (transfer.start_s, transfer.end_s, streams.now_s) == (0.0, 5.0, 9.0)
    streams.wait(transfer)
    assert (streams.now_s, transfer.exposed_s, transfer.hidden_s) == (9.0, 0.0, 5.0)
    assert len(streams.spans) == 1 and streams.spans[0].end_s == 9.0


def test_waiting_exposes_what_is_left() -> None:
    streams = Streams(slowdown=1.0)
    transfer = streams.start(moved(5.0))
    streams.compute(2.0)
    streams.wait(transfer)
    assert (streams.now_s, streams.exposed_s) == (5.0, 3.0)
    assert (transfer.hidden_s, transfer.exposed_s) == (2.0, 3.0)


def test_a_small_collective_queues_behind_a_large_one_of_its_link() -> None:
    streams = Streams(slowdown=1.0)
    large = streams.start(moved(10.0))
    small = streams.start(moved(1.0))
    streams.wait(small)
    assert (small.issued_s, small.start_s, small.end_s) == (0.0, 10.0, 11.0)
    # Waiting behind the large one is the large one's doing.
    assert (large.exposed_s, small.exposed_s) == (10.0, 1.0)


def test_links_work_side_by_side() -> None:
    streams = Streams(slowdown=1.1)
    first, second = streams.start(moved(3.0, NODE)), streams.start(moved(2.0, NETWORK))
    streams.wait(first)
    streams.wait(second)
    assert (first.end_s, second.end_s, streams.now_s) == (3.0, 2.0, 3.0)


def test_what_costs_nothing_is_done_at_once() -> None:
    streams = Streams(slowdown=1.1)
    streams.compute(1.0)
    transfer = streams.start(moved(0.0))
    streams.wait(transfer)
    assert (transfer.end_s, streams.now_s) == (1.0, 1.0)


def test_slowdowns_beyond_two_are_refused() -> None:
    for wrong in (0.9, 2.1):
        with pytest.raises(ValueError, match="from 1 .none. to 2"):
            Streams(wrong)


SECONDS = st.integers(0, 40).map(lambda n: n / 4)
LINKS = st.sampled_from([NODE, NETWORK])
WORK = st.lists(
    st.one_of(
        st.tuples(st.just("compute"), SECONDS),
        st.tuples(st.just("start"), LINKS, SECONDS),
        st.tuples(st.just("wait"), st.integers(0, 5)),
    ),
    max_size=30,
)
SLOWDOWNS = st.sampled_from([1.0, 1.1256, 1.5, 2.0])
SCALES = st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0])


def run(
    work: list[tuple[object, ...]],
    slowdown: float,
    scale: dict[str, float] | None = None,
) -> tuple[Streams, dict[str, float]]:
    """(streams after the work, seconds alone by stream). ("wait", n): for the n-th last one not
    waited for yet. scale: factors on the work of streams. All are waited for at the end."""
    scale = scale or {}
    streams = Streams(slowdown)
    alone = {"compute": 0.0, NODE: 0.0, NETWORK: 0.0}
    waiting = []
    for what, *rest in work:
        if what == "compute":
            seconds = rest[0] * scale.get("compute", 1.0)  # type: ignore[operator]
            alone["compute"] += seconds
            streams.compute(seconds)
        elif what == "start":
            link, seconds = rest[0], rest[1] * scale.get(rest[0], 1.0)  # type: ignore
            alone[link] += seconds  # type: ignore[index]
            waiting.append(streams.start(moved(seconds, link)))  # type: ignore[arg-type]
        elif waiting:
            streams.wait(waiting.pop(-1 - rest[0] % len(waiting)))  # type: ignore[operator]
    for transfer in waiting:
        streams.wait(transfer)
    return streams, alone


@given(WORK, SLOWDOWNS)
def test_a_step_is_no_shorter_than_its_longest_stream_and_no_longer_than_all(
    work: list[tuple[object, ...]], slowdown: float
) -> None:
    streams, alone = run(work, slowdown)
    assert streams.now_s >= max(alone.values()) - 1e-9
    assert streams.now_s <= sum(alone.values()) + 1e-9


@given(WORK, SLOWDOWNS)
def test_times_of_streams_add_up(work: list[tuple[object, ...]], slowdown: float) -> None:
    streams, alone = run(work, slowdown)
    busy_s = sum(span.end_s - span.start_s for span in streams.spans)
    assert busy_s + streams.exposed_s == pytest.approx(streams.now_s, abs=1e-9)
    assert alone["compute"] - 1e-9 <= busy_s <= slowdown * alone["compute"] + 1e-9
    assert sum(t.exposed_s for t in streams.transfers) == pytest.approx(streams.exposed_s)
    for link in (NODE, NETWORK):
        members = [t for t in streams.transfers if t.collective.link == link]
        # In order of issue, one at a time.
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in zip(members, members[1:], strict=False))
        assert all(t.end_s - t.start_s >= t.collective.seconds - 1e-9 for t in members)


@given(WORK, SLOWDOWNS, SCALES, SCALES, SCALES)
def test_less_work_never_takes_longer(
    work: list[tuple[object, ...]], slowdown: float, device: float, node: float, network: float
) -> None:
    slow, _ = run(work, slowdown)
    fast, _ = run(work, slowdown, {"compute": device, NODE: node, NETWORK: network})
    assert fast.now_s <= slow.now_s + 1e-9
