"""What the host needs longer than the device, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.graphs.op_graphs import mlp

from meshfold.passes.price.host_issue import issued_by_host
from meshfold.passes.price.op_time import OpTime

GRAPH = mlp(residual=True)
NUM_OPS = len(GRAPH.ops)


def times(forward_s: float, backward_s: float) -> list[OpTime]:
    return [OpTime(forward_s, backward_s, (), (), ()) for _ in GRAPH.ops]


def test_a_device_that_is_slower_than_the_host_waits_for_nothing() -> None:
    own = times(3.0, 6.0)
    assert issued_by_host(own, GRAPH, 3.0) == own
    assert issued_by_host(own, GRAPH, 0.0) == own


def test_what_the_host_needs_longer_is_divided_among_the_ops() -> None:
    issued = issued_by_host(times(1.0, 2.0), GRAPH, 4.0)
    assert [t.forward_s for t in issued] == pytest.approx([1 + 3] * NUM_OPS)
    assert [t.backward_s for t in issued] == pytest.approx([2 + 2] * NUM_OPS)


@given(
    st.lists(st.floats(0, 10), min_size=NUM_OPS, max_size=NUM_OPS),
    st.floats(0, 10),
)
def test_a_region_takes_the_longer_of_device_and_host(
    seconds: list[float], host_op_s: float
) -> None:
    own = [OpTime(s, 2 * s, (), (), ()) for s in seconds]
    issued = issued_by_host(own, GRAPH, host_op_s)
    for name in ("forward_s", "backward_s"):
        total_s = sum(getattr(t, name) for t in issued)
        device_s = sum(getattr(t, name) for t in own)
        assert total_s == pytest.approx(max(device_s, NUM_OPS * host_op_s))
