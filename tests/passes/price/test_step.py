"""Step time by hand-made region prices."""

import math
from dataclasses import replace

import pytest
from support.graphs.op_graphs import costs_on, folded_stack

from meshfold.ir.cluster import OVERLAP_SLOWDOWN
from meshfold.ir.spmd import INVARIANT, Shard
from meshfold.ir.strategy import RegionTyping
from meshfold.passes.price.conversions import conversion_cost
from meshfold.passes.price.region import RegionPrice
from meshfold.passes.price.step import boundary_s, estimate_step

PRICE = RegionPrice(
    forward_s=1.0,
    backward_s=2.0,
    graph_forward_s=0.0,
    graph_backward_s=0.0,
    communication_s={"dp": 0.0},
    gather_s={"dp": 0.0},
    reduce_s={"dp": 0.0},
    conversions=(),
)
LOST = OVERLAP_SLOWDOWN - 1
"""Of a second in which kernels and a collective both run."""
FOLDED = folded_stack(num_layers=2)
"""Four instances: first, two layers, last."""


def estimate(price: RegionPrice, layout=INVARIANT, optimizer: str = "adamw"):
    _, costs, _ = costs_on(2, 1)
    typings = [
        RegionTyping(
            tuple((layout,) for _ in region.graph.slots),
            (),
            ((layout,),) * len(region.graph.outputs),
        )
        for region in FOLDED.regions
    ]
    return estimate_step(FOLDED, typings, [price] * 3, costs, optimizer)


def test_compute_alone():
    found = estimate(PRICE)
    assert found.forward_s == 4.0 and found.backward_s == 8.0
    assert found.exposed_communication_s == 0.0
    assert found.step_s == pytest.approx(12.0 + found.optimizer_s)


def test_in_graph_communication_is_exposed():
    busy = replace(PRICE, graph_forward_s=0.25, graph_backward_s=0.5, communication_s={"dp": 0.75})
    found = estimate(busy)
    assert found.exposed_communication_s == pytest.approx(4 * 0.75)
    assert found.communication_s == {"dp": 3.0}


def test_short_gathers_hide_but_the_first():
    found = estimate(replace(PRICE, gather_s={"dp": 0.5}))
    assert found.exposed_communication_s == pytest.approx(0.5 + 4 * 2 * 0.5 * LOST)
    assert found.communication_s == {"dp": pytest.approx(4 * 2 * 0.5)}


def test_short_reductions_hide_but_the_last():
    found = estimate(replace(PRICE, reduce_s={"dp": 0.5}))
    assert found.exposed_communication_s == pytest.approx(0.5 + 4 * 0.5 * LOST)


def test_long_gathers_and_reductions_stick_out():
    found = estimate(replace(PRICE, gather_s={"dp": 3.0}, reduce_s={"dp": 1.0}))
    # Each of four: 3 - 1 forward, 3 + 1 - 2 backward. The first gather and the last reduction: 4.
    # Kernels have a collective beside them all the time.
    assert found.exposed_communication_s == pytest.approx(4 * (2 + 2) + 4 + 4 * (1 + 2) * LOST)


def test_a_value_that_changes_layout_between_instances_is_converted_by_the_consumer():
    _, costs, _ = costs_on(2, 1)
    agreeing = [
        RegionTyping(tuple((INVARIANT,) for _ in r.graph.slots), (), ((INVARIANT,),))
        for r in FOLDED.regions
    ]
    assert boundary_s(FOLDED, agreeing, costs) == 0.0
    leaving = [*agreeing[:1], replace(agreeing[1], outputs=((Shard(0),),)), *agreeing[2:]]
    (value,) = {FOLDED.regions[1].graph.values[v] for v in FOLDED.regions[1].graph.outputs}
    one_s = conversion_cost(value, (Shard(0),), (INVARIANT,), costs).total_s
    # Layer 1 reads layer 0, the last region reads layer 1.
    assert boundary_s(FOLDED, leaving, costs) == pytest.approx(2 * one_s)
    priced = estimate_step(FOLDED, leaving, [PRICE] * 3, costs, "adamw")
    assert priced.exposed_communication_s == pytest.approx(2 * one_s)


def test_optimizer_passes_over_local_states():
    _, costs, _ = costs_on(2, 1)
    whole, half = estimate(PRICE), estimate(PRICE, layout=Shard(0))
    num_bytes = 4 * sum(p.shape[0] * p.shape[1] for p in FOLDED.parameters)
    expected = costs.compute_s(0, 7 * num_bytes, "float32")
    assert whole.optimizer_s == pytest.approx(expected)
    launch_s = costs.launch_s
    assert half.optimizer_s - launch_s == pytest.approx((whole.optimizer_s - launch_s) / 2)
    assert estimate(PRICE, optimizer="sgd").optimizer_s < whole.optimizer_s


def test_tied_parameter_counts_once():
    tied = folded_stack(num_layers=1, tied=True)
    _, costs, _ = costs_on(2, 1)
    typings = [
        RegionTyping(((INVARIANT,),) * len(graph.slots), (), ((INVARIANT,),) * len(graph.outputs))
        for graph in (region.graph for region in tied.regions)
    ]
    num_bytes = 4 * sum(math.prod(p.shape) for p in tied.parameters)
    expected = costs.compute_s(0, 7 * num_bytes, "float32")
    step = estimate_step(tied, typings, [PRICE] * len(tied.regions), costs, "adamw")
    assert {p.name for p in tied.parameters} == {"first", "0.up", "0.down"}
    assert step.optimizer_s == pytest.approx(expected)
