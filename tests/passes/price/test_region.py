"""The exact price of a typed region: every emitted conversion once."""

from dataclasses import replace

import pytest
from support.graphs.op_graphs import GraphBuilder, costs_on, mlp
from support.programs.prices import price_region

from meshfold.ir.op_graph import OpGraph
from meshfold.ir.spmd import INVARIANT, PARTIAL, REPLICATE, Shard
from meshfold.ir.strategy import RegionTyping
from meshfold.passes.graph.typed import layouts_of_values, value_name
from meshfold.passes.price.conversions import conversion_cost
from meshfold.passes.price.op_time import op_time
from meshfold.passes.rules.table import AxisRule, region_rules, typing_of

I = INVARIANT  # noqa: E741  the letter of the type


def typed(graph: OpGraph, names: list[str], slots, outputs, size: int = 2):
    rules: list[tuple[AxisRule, ...]] = []
    for table, name in zip(region_rules(graph, (size,)), names, strict=True):
        rules.append(tuple(r for r in table[0] if r.name == name))
        assert len(rules[-1]) == 1, f"{name} not in {[r.name for r in table[0]]}"
    ops = tuple(typing_of(graph, k, r) for k, r in enumerate(rules))
    return RegionTyping(slots, ops, outputs), rules


def test_column_row_pair():
    graph = mlp()
    mesh, costs, _ = costs_on(1, 2)
    typing, rules = typed(graph, ["o", "d1", "k"], ((I,), (Shard(0),), (Shard(1),)), ((I,),))
    price = price_region(graph, typing, rules, costs)
    assert [(c.value, str(c.source[0]), str(c.target[0])) for c in price.conversions] == [
        ("slot 0", "I", "R"),
        ("op2.linear", "P", "I"),
    ]
    x, y = graph.values[0], graph.values[-1]
    enter = conversion_cost(x, (I,), (REPLICATE,), costs)
    leave = conversion_cost(y, typing.ops[2].outputs[0], (I,), costs)
    assert price.graph_backward_s == pytest.approx(enter.backward_s)
    assert price.graph_forward_s == pytest.approx(leave.forward_s)
    assert price.communication_s["tp"] == pytest.approx(enter.total_s + leave.total_s)
    assert price.gather_s == {"tp": 0.0} and price.reduce_s == {"tp": 0.0}


def test_parameters_travel_in_one_bucket():
    graph = mlp()
    mesh, costs, _ = costs_on(2, 1)
    shard = (Shard(0),)
    typing, rules = typed(graph, ["d0", "d0", "d0"], (shard, shard, shard), (shard,))
    price = price_region(graph, typing, rules, costs)
    num_bytes = 4 * 2 * 16 * 8  # both weights, gathered
    assert price.gather_s["dp"] == costs.collective_s("all_gather", num_bytes, (0,))
    assert price.reduce_s["dp"] == costs.collective_s("reduce_scatter", num_bytes, (0,))
    assert price.communication_s == {"dp": 0.0}
    total = price.total_communication_s["dp"]
    assert total == pytest.approx(2 * price.gather_s["dp"] + price.reduce_s["dp"])
    assert [c.kind for c in price.conversions] == ["parameter", "parameter"]


def test_users_of_one_layout_share_a_conversion():
    b = GraphBuilder()
    x = b.slot(4, 8)
    weights = [b.parameter(8, 8) for _ in range(2)]
    graph = b.build(*(b.linear(x, w) for w in weights))
    mesh, costs, _ = costs_on(1, 2)
    shard = (Shard(0),)
    leaves = ((Shard(1),), (Shard(1),))
    typing, rules = typed(graph, ["o", "o"], ((I,), shard, shard), leaves)
    assert len(price_region(graph, typing, rules, costs).conversions) == 1


def again_of(graph: OpGraph, names: list[str], slots, outputs):
    """(price without recomputation, with it, rules, costs) on a tp axis of 2."""
    mesh, costs, _ = costs_on(1, 2)
    typing, rules = typed(graph, names, slots, outputs)
    full = replace(typing, recompute="full")
    prices = [price_region(graph, t, rules, costs) for t in (typing, full)]
    return *prices, rules, costs


def test_recomputation_adds_what_is_recomputed_to_the_backward():
    # Row, then column parallel: the pending sum goes to the second product, which is not run.
    graph = mlp(residual=True)
    slots = ((Shard(1),), (Shard(1),), (Shard(0),))
    plain, full, rules, costs = again_of(graph, ["k", "I", "o", "I"], slots, ((I,),))
    times = [op_time(graph, op, r, costs) for op, r in zip(graph.ops, rules, strict=True)]
    compute_s = times[0].forward_s + times[1].forward_s
    hidden = graph.values[graph.ops[0].outputs[0]]
    summed = conversion_cost(hidden, (PARTIAL,), (I,), costs)
    copied = conversion_cost(hidden, (I,), (REPLICATE,), costs)
    assert summed.forward_s > 0 and copied.forward_s == 0
    assert full.recomputed == plain.recomputed
    assert full.backward_s == pytest.approx(plain.backward_s + compute_s)
    assert full.graph_backward_s == pytest.approx(plain.graph_backward_s + summed.forward_s)
    more = full.communication_s["tp"] - plain.communication_s["tp"]
    assert more == pytest.approx(summed.forward_s)
    # Gathered for the residual sum and for the output, neither of which runs again.
    assert plain.graph_forward_s > summed.forward_s
    for name in ("forward_s", "graph_forward_s", "gather_s", "reduce_s", "conversions"):
        assert getattr(full, name) == getattr(plain, name)


def test_the_collective_behind_the_last_product_is_not_recomputed():
    slots = ((I,), (Shard(0),), (Shard(1),))
    plain, full, *_ = again_of(mlp(), ["o", "d1", "k"], slots, ((I,),))
    assert plain.graph_forward_s > 0
    assert full.graph_backward_s == plain.graph_backward_s
    assert full.communication_s == plain.communication_s
    assert full.backward_s > plain.backward_s


def test_layouts_of_values():
    graph = mlp(residual=True)
    slots = ((I,), (Shard(0),), (Shard(1),))
    typing, _ = typed(graph, ["o", "d1", "k", "I"], slots, ((I,),))
    native, demands = layouts_of_values(graph, typing)[0]
    assert native == (I,)
    assert demands == ((REPLICATE,), (I,))


def test_value_names():
    graph = mlp()
    names = [value_name(graph, v) for v in range(6)]
    assert names == ["slot 0", "up", "down", "op0.linear", "op1.relu", "op2.linear"]
