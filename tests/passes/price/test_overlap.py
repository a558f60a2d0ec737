"""What a microbatch takes beside what ZeRO moves, against streams that run both."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfold.cost_models.simulation.streams import Streams, overlapped_s
from meshfold.ir.step_events import CollectiveEvent
from meshfold.passes.price.overlap import Busy, MicrobatchSeconds

SECONDS = st.floats(0, 10)
SLOWDOWNS = st.floats(1, 2)


def gather_of(seconds: float) -> CollectiveEvent:
    return CollectiveEvent("all_gather", ("dp",), "network", 1, seconds)


def as_run(kernels_s: float, moved_s: float, slowdown: float) -> float:
    streams = Streams(slowdown)
    gather = streams.start(gather_of(moved_s))
    streams.compute(kernels_s)
    streams.wait(gather)
    return streams.now_s


@given(SECONDS, SECONDS, SLOWDOWNS)
def test_kernels_beside_a_collective_take_what_streams_say(
    kernels_s: float, moved_s: float, slowdown: float
) -> None:
    run_s = as_run(kernels_s, moved_s, slowdown)
    assert overlapped_s(kernels_s, moved_s, slowdown) == pytest.approx(run_s, abs=1e-9)
    assert Busy(kernels_s, 0.0, slowdown).beside_s(moved_s) == pytest.approx(run_s, abs=1e-9)


def test_collectives_in_the_graph_are_not_slower() -> None:
    """3 s of kernels and 1 s that they wait for, beside 2 s: kernels have 3/4 of these."""
    assert Busy(3.0, 1.0, 1.5).beside_s(2.0) == pytest.approx(4.0 + 0.5 * 2.0 * 3 / 4)
    assert Busy(3.0, 1.0, 1.5).beside_s(6.0) == pytest.approx(6.0 + 0.5 * 4.0 * 3 / 4)
    assert Busy(0.0, 4.0, 1.5).beside_s(2.0) == 4.0


@given(SECONDS, SECONDS, SLOWDOWNS, st.integers(1, 20))
def test_layers_of_a_stage_add_up_to_its_forward(
    kernels_s: float, gather_s: float, slowdown: float, num_layers: int
) -> None:
    """Each layer's gather runs beside the layer before; nothing hides the first."""
    streams = Streams(slowdown)
    coming = streams.start(gather_of(gather_s))
    for k in range(num_layers):
        streams.wait(coming)
        if k + 1 < num_layers:
            coming = streams.start(gather_of(gather_s))
        streams.compute(kernels_s)
    layer = MicrobatchSeconds(
        Busy(kernels_s, 0.0, slowdown), Busy(0.0, 0.0, slowdown), gather_s, 0.0
    )
    added_up_s = num_layers * layer.forward_s(1 / num_layers)
    # The last layer has no gather beside it: its kernels are the whole of that difference.
    assert added_up_s <= streams.now_s + 1e-9
    assert streams.now_s <= added_up_s + kernels_s + 1e-9


@given(SECONDS, SECONDS, SECONDS, SECONDS, SLOWDOWNS, st.floats(0, 1))
def test_no_share_takes_less_than_all_hidden(
    kernels_s: float, graph_s: float, gather_s: float, reduced_s: float, k: float, share: float
) -> None:
    busy = Busy(kernels_s, graph_s, k)
    seconds = MicrobatchSeconds(busy, busy, gather_s, reduced_s)
    assert seconds.forward_s() <= seconds.forward_s(share) + 1e-9
    assert seconds.backward_s() <= seconds.backward_s(share) + 1e-9
    assert seconds.forward_s(1.0) == pytest.approx(busy.seconds + gather_s)
