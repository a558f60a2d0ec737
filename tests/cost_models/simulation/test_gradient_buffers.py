"""Buffers of gradients in a backward, by hand."""

import pytest

from meshfold.cost_models.simulation.gradient_buffers import GradientBuffers
from meshfold.cost_models.simulation.hierarchical_all_reduce import ReductionStreams
from meshfold.cost_models.simulation.streams import Streams
from meshfold.ir.step_events import CollectiveEvent, ParameterGroupEvents, ReduceBucket

SCATTER = CollectiveEvent("reduce_scatter", ("dp",), "network", 100, 3.0)
GROUP = ParameterGroupEvents(
    None, SCATTER, unsharded_bytes=0, flat_bytes=200, result_bytes=50, saved=False
)


@pytest.mark.parametrize("adds", [False, True])
def test_a_buffer_lives_until_the_link_has_read_it(adds: bool) -> None:
    """One that is a sum is resident during its own backward, and counts from the next one on."""
    streams = Streams(1.0)
    group = ParameterGroupEvents(None, SCATTER, 0, 200, 50, saved=False, adds_to_sum=adds)
    buffers = GradientBuffers(ReductionStreams(streams), [[group]], ())
    buffers.reduce(0, 0)
    assert buffers.num_bytes == 50 + 200 * (not adds)
    buffers.end_instance()
    assert buffers.num_bytes == 200
    streams.compute(4.0)
    assert buffers.num_bytes == 0


def test_a_bucket_waits_for_its_members() -> None:
    streams = Streams(1.0)
    both = ReduceBucket(((1, 0), (0, 0)), SCATTER)
    buffers = GradientBuffers(ReductionStreams(streams), [[GROUP], [GROUP]], (both,))
    buffers.reduce(1, 0)
    assert buffers.num_bytes == 400 + 50 and not buffers.started
    buffers.end_instance()
    assert buffers.num_bytes == 400
    buffers.reduce(0, 0)
    assert len(buffers.started) == 1 and buffers.num_bytes == 400 + 50
    streams.compute(4.0)
    buffers.end_instance()
    assert buffers.num_bytes == 0


def test_shards_are_added_up_behind_the_next_instance() -> None:
    streams = Streams(1.0)
    both = ReduceBucket(((2, 0), (1, 0)), SCATTER)
    buffers = GradientBuffers(ReductionStreams(streams), [[GROUP]] * 3, (both,), adds_shards=True)
    for instance, at_its_end, behind in (
        (2, 50 + 400, 400),
        (1, 50 + 400, 100),
        (0, 100 + 250, 50),
    ):
        buffers.reduce(instance, 0)
        assert buffers.num_bytes == at_its_end
        buffers.end_instance()
        streams.compute(4.0)
        assert buffers.num_bytes == behind


def test_links_are_never_further_behind_than_the_next_instance() -> None:
    streams = Streams(1.0)
    args = ReductionStreams(streams), [[GROUP]] * 3, ()
    buffers = GradientBuffers(*args, adds_shards=True)
    ends_s = []
    for instance in (2, 1, 0):
        streams.compute(1.0)
        buffers.reduce(instance, 0)
        buffers.end_instance()
        ends_s.append(streams.now_s)
    # Each takes 3 s on the link, one behind the other: the second instance waits for the first's.
    assert ends_s == [1.0, 4.0, 7.0] and len(buffers.started) == 1


def test_what_another_instance_runs_is_resident_already() -> None:
    reduced = ParameterGroupEvents(None, None, 0, 200, 0, saved=False)
    buffers = GradientBuffers(ReductionStreams(Streams(1.0)), [[reduced]], ())
    mark = buffers.begin_epilogue_step()
    buffers.reduce(0, 0)
    assert buffers.num_bytes == 200
    buffers.end_epilogue_step(mark)
    assert buffers.num_bytes == 0
