"""hierarchical all-reduces: their price, and where they are chosen."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.programs.local_programs import Stack

import meshfold
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.cost_models.simulation.hierarchical_all_reduce import ReductionStreams
from meshfold.cost_models.simulation.step import simulate
from meshfold.cost_models.simulation.streams import Streams
from meshfold.hierarchical_all_reduce import HierarchicalSplit
from meshfold.ir.cluster import ClusterSpec, LinkSpec, NodeGroup
from meshfold.ir.mesh import Mesh, MeshAxis
from meshfold.ir.node_groups import ACROSS_NODES, IN_NODE
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.ir.step_events import CollectiveEvent
from meshfold.passes.events.bucketing import BucketSizes, with_buckets
from meshfold.passes.events.hierarchical import hierarchical_events, in_steps, piece_sizes
from meshfold.plan_file.event_text import read_collective, write_collective

# Round figures: 100 bytes per second and 1 s per step in a node, 10 and 5 over the network.
LINK = LinkSpec("link", 100.0, 1.0, "test", start_s=0.5)
NETWORK = LinkSpec("network", 10.0, 5.0, "test", start_s=2.0)
DEVICE = resolve_cluster("dgx-a100-80").groups[0].device
COSTS = CostModel(
    ClusterSpec("round", (NodeGroup(DEVICE, 2, 4, LINK),), NETWORK), Mesh((MeshAxis("dp", 8),))
)
WHOLE = CollectiveEvent(
    "all_reduce", ("dp",), "network", 800, COSTS.collective_s("all_reduce", 800, (0,))
)


def test_hand_computed_steps() -> None:
    found = in_steps(WHOLE, HierarchicalSplit(4, 2, 1), COSTS)
    # 0.5 start, 3 steps, 800 * 3/4 at 100; of 200 the ring's 2 steps of 3.5 * 5, each of which
    # waits 5/4 * 1/2 for the slower of 2 hops, 2 * 200 / 2 at 10
    expected = [
        ("reduce_scatter", ("dp", IN_NODE), "link", 800, 0.5 + 3 + 6),
        ("all_reduce", ("dp", ACROSS_NODES), "network", 200, 2 + 2 * 17.5 + 2 * 0.625 + 20),
        ("all_gather", ("dp", IN_NODE), "link", 800, 0.5 + 3 + 6),
    ]
    assert [(p.kind, p.axes, p.link, p.num_bytes, p.seconds) for p in found.steps] == expected
    assert (found.num_bytes, found.pieces, found.seconds) == (800, 1, 9.5 + 58.25 + 9.5)


def test_pieces_overlap_each_other() -> None:
    found = in_steps(WHOLE, HierarchicalSplit(4, 2, 2), COSTS)
    # A tree between 2 nodes: up and down 3.5 * 5, 100 at 0.92 of 10.
    tree_s = 2 + 2 * 17.5 + 100 / 9.2
    assert [p.seconds for p in found.steps] == pytest.approx([6.5, tree_s, 6.5])
    # The network is what both wait for: the first piece is there after 6.5.
    assert found.seconds == pytest.approx(6.5 + 2 * tree_s + 6.5)


@given(
    seconds=st.tuples(*[st.floats(1e-3, 10)] * 3),
    pieces=st.integers(1, 6),
)
def test_alone_it_takes_what_the_formula_says(seconds: tuple[float, ...], pieces: int) -> None:
    r, a, g = seconds
    steps = tuple(
        replace(p, seconds=s)
        for p, s in zip(
            in_steps(WHOLE, HierarchicalSplit(4, 2, 1), COSTS).steps, seconds, strict=True
        )
    )
    of = replace(WHOLE, steps=steps, pieces=pieces)
    streams = Streams(1.0)
    reducing = ReductionStreams(streams)
    reducing.finish(reducing.start(of))
    longest_s = r + a + g + (pieces - 1) * max(seconds)
    assert streams.now_s == pytest.approx(max(longest_s, pieces * (r + g)))
    assert streams.exposed_s == pytest.approx(streams.now_s)
    assert len(streams.transfers) == 3 * pieces


def test_a_line_of_the_plan_file() -> None:
    found = in_steps(WHOLE, HierarchicalSplit(4, 2, 2), COSTS)
    text = write_collective(found)
    assert text.startswith(
        "all_reduce dp network 800 108.73913043478261 = 2 x reduce_scatter dp,in-node link 400"
    )
    assert read_collective(text) == found
    for wrong in (
        text.replace("2 x", "0 x"),
        text.replace("2 x ", ""),
        text.rpartition(" + ")[0],
        text.replace("all_reduce dp network 800", "all_gather dp network 800"),
    ):
        with pytest.raises(ValueError, match="write 'all_reduce ... = PIECES x' and 3 steps"):
            read_collective(wrong)


def planned(cluster: str, **pins: Any) -> Plan:
    """Four layers of 34 MB, data parallel on all devices."""
    with torch.device("meta"):
        model = Stack(4, 2048)
    spec = resolve_cluster(cluster)
    batch = {name: torch.empty(spec.num_devices, 2048) for name in ("x", "target")}
    options = CompileOptions(pins={"dp": spec.num_devices, "zero": 0, **pins})
    return meshfold.find_plan(model, spec, batch, options=options)


@pytest.mark.parametrize(
    ("cluster", "pays"), [("a10gx2", True), ("a10gx3", True), ("dgx-h100x8", False)]
)
def test_steps_are_taken_where_they_are_faster(cluster: str, pays: bool) -> None:
    plain, found = planned(cluster, hierarchical_all_reduce=0), planned(cluster)
    assert plain.simulated is not None and found.simulated is not None and found.events is not None
    assert plain.hierarchical_all_reduce_bytes == 0
    assert bool(found.hierarchical_all_reduce_bytes) == pays
    assert found.simulated == simulate(found.events).step
    assert found.simulated.step_s == pytest.approx(plain.simulated.step_s) or pays
    assert not pays or found.simulated.step_s < 0.95 * plain.simulated.step_s


def test_no_size_that_was_tried_is_better() -> None:
    plain = planned("a10gx3", hierarchical_all_reduce=0)
    costs = CostModel(plain.cluster, plain.mesh)
    found = with_buckets(plain, BucketSizes())
    assert found.events is not None and plain.events is not None and found.simulated is not None
    sizes = list(piece_sizes(plain.events, costs))
    assert len(sizes) > 1 and sizes == sorted(sizes, reverse=True)
    for size in sizes:
        step = simulate(hierarchical_events(plain.events, size, costs)).step
        assert found.simulated.step_s <= step.step_s * 1.0002
    # And back again.
    assert hierarchical_events(found.events, 0, costs).regions == plain.events.regions


def test_what_does_not_fit_is_not_taken() -> None:
    plain = planned("a10gx2", hierarchical_all_reduce=0)
    assert plain.simulated is not None
    tight = replace(plain.memory, reserve=0, capacity=plain.simulated.peak_bytes)
    careful = with_buckets(replace(plain, memory=tight), BucketSizes())
    assert careful.simulated is not None
    assert careful.simulated.peak_bytes <= plain.simulated.peak_bytes


def test_one_node_has_no_steps() -> None:
    plan = planned("a10gx1")
    assert plan.events is not None
    assert list(piece_sizes(plan.events, CostModel(plan.cluster, plan.mesh))) == []
