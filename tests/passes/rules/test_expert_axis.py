"""Rules of rows that travel to their experts: types, prices, and where there are none."""

from dataclasses import replace
from functools import cache

import pytest
from support.models.hugging_face import BATCH, SEQUENCE, tiny_model

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.ir.op_graph import FoldedGraph, OpGraph, Region
from meshfold.ir.spmd import INVARIANT, REPLICATE, Experts, Shard
from meshfold.passes.price.conversions import axis_conversion
from meshfold.passes.price.op_time import op_time
from meshfold.passes.region.roles import AxisRole
from meshfold.passes.region.space import SearchSpace
from meshfold.passes.region.typing import MeshSearch
from meshfold.passes.rules.expert_axis import (
    dispatched_rule,
    dispatched_values,
    expert_rules,
    shared_experts,
)
from meshfold.passes.rules.ops.experts import COMBINE, DISPATCH, EXPERT_LINEAR, EXPERT_LOAD
from meshfold.passes.rules.table import AxisRule, region_rules

ROWS = BATCH * SEQUENCE * 2


@cache
def graph_of(family: str) -> FoldedGraph:
    model, batch = tiny_model(family)
    return capture(model, batch).graph


def layer_of(family: str) -> OpGraph:
    """The region with the experts."""
    graphs = [region.graph for region in graph_of(family).regions]
    return next(g for g in graphs if any(op.target == EXPERT_LINEAR for op in g.ops))


def batch_rules(graph: OpGraph, size: int) -> list[AxisRule]:
    """Rows are sharded wherever an op can, else it runs unsharded."""
    rules = region_rules(graph, (size,))
    return [
        next((r for r in of_op if r.splits_work and r.name.split("/")[0] == "d0"), of_op[0])
        for (of_op,) in rules
    ]


def by_target(graph: OpGraph, rules: tuple[AxisRule, ...], target: str) -> list[AxisRule]:
    return [rule for op, rule in zip(graph.ops, rules, strict=True) if op.target == target]


@pytest.mark.parametrize("family", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_rows_between_dispatch_and_combine_are_with_their_experts(family: str) -> None:
    graph = layer_of(family)
    rules, weights = expert_rules(graph, batch_rules(graph, 2), 2)
    there, ids_there = by_target(graph, rules, DISPATCH)
    assert (there.inputs, there.outputs) == ((Shard(0), Shard(0)), (Experts(),))
    assert ids_there.outputs == (Experts(),)
    (back,) = by_target(graph, rules, COMBINE)
    assert (back.inputs, back.outputs) == ((Experts(), Shard(0)), (Shard(0),))
    for product in by_target(graph, rules, EXPERT_LINEAR):
        assert product.inputs[:3] == (Experts(), Shard(0), Experts())
        assert product.inputs[3:] == (Shard(0),) * (len(product.inputs) - 3)
        assert product.outputs == (Experts(),) and product.load == EXPERT_LOAD
    away = dispatched_values(graph)
    for op, rule in zip(graph.ops, rules, strict=True):
        for v, t in zip((*op.operands, *op.outputs), (*rule.inputs, *rule.outputs), strict=True):
            assert (t.kind == "E") == (v in away), op
    assert {graph.slots[v].name for v in weights} == {
        name for name in (slot.name for slot in graph.slots) if "experts." in name
    }


def test_without_a_division_of_the_experts_all_stay_at_home() -> None:
    graph = layer_of("mixtral")
    chosen = batch_rules(graph, 8)
    assert expert_rules(graph, chosen, 8) == (tuple(chosen), frozenset())
    assert shared_experts(graph_of("mixtral")) == {4}
    assert shared_experts(graph_of("llama")) == frozenset()


def test_a_row_that_is_not_sharded_does_not_travel() -> None:
    graph = layer_of("mixtral")
    op = next(op for op in graph.ops if op.target == DISPATCH)
    whole = AxisRule("R", (REPLICATE, INVARIANT), (REPLICATE,))
    assert dispatched_rule(graph, op, whole, 2, dispatched_values(graph)) is None


def test_rows_that_would_cross_between_regions_do_not_travel() -> None:
    folded = graph_of("mixtral")
    regions = []
    for region in folded.regions:
        away = sorted(dispatched_values(region.graph))
        graph = replace(region.graph, outputs=(*region.graph.outputs, *away[:1]))
        regions.append(Region(region.name, graph))
    assert shared_experts(replace(folded, regions=tuple(regions))) == frozenset()


def test_an_exchange_is_as_large_as_the_busiest_rank() -> None:
    """64 rows over 2 ranks, 1.25 times half of them on the busiest; and 4 counts of 8 bytes."""
    graph = layer_of("mixtral")
    cluster = resolve_cluster("dgx-h100", 2)
    mesh = build_mesh(cluster, 1, 1, ep=2)
    costs = MeshSearch(graph_of("mixtral"), cluster, mesh, BATCH).costs
    rules, _ = expert_rules(graph, batch_rules(graph, 2), 2)
    k, op = next((k, op) for k, op in enumerate(graph.ops) if op.target == DISPATCH)
    time = op_time(graph, op, (rules[k],), costs)
    rows = graph.values[op.operands[0]]
    assert rows.shape == (ROWS, 32)
    exchange_s = costs.collective_s("all_to_all", rows.num_bytes * 1.25 / 2, (0,))
    counts_s = costs.collective_s("all_to_all", 32, (0,))
    assert time.communication_s == pytest.approx((exchange_s + counts_s,))
    assert time.backward_communication_s == pytest.approx((exchange_s,))
    # A second run of the forward knows the counts.
    assert time.recomputed_communication_s == pytest.approx((exchange_s,))
    # Beside that rows are put in another order; where they stay nothing happens.
    local_bytes = rows.num_bytes / 2 * (1 + 1.25) + 8 * ROWS / 2
    assert time.forward_s == pytest.approx(costs.compute_s(0, local_bytes, "float64"))
    still = op_time(graph, op, (region_rules(graph, (2,))[k][0][0],), costs)
    assert still.total_s == 0.0


def test_counts_are_exchanged_once_and_ids_never() -> None:
    """By the first op on the same ids; combine, and the ids' own dispatch, know them."""
    graph = layer_of("mixtral")
    rules, _ = expert_rules(graph, batch_rules(graph, 2), 2)
    there, ids_there = by_target(graph, rules, DISPATCH)
    (back,) = by_target(graph, rules, COMBINE)
    found = [
        [(c.is_saved, c.is_asynchronous, c.is_backward) for c in r.comm] for r in (there, back)
    ]
    rows = [(False, True, False), (False, True, True)]
    assert found == [[(True, False, False), *rows], rows]
    assert ids_there.comm == ()


def space_of(dp: int, ep: int, tp: int) -> SearchSpace:
    cluster = resolve_cluster("local-cpu", dp * ep * tp)
    mesh = build_mesh(cluster, dp, tp, ep=ep)
    return MeshSearch(graph_of("mixtral"), cluster, mesh, BATCH).space


def test_the_batch_is_sharded_by_dp_then_ep_and_experts_by_ep() -> None:
    space = space_of(2, 2, 2)
    region = max(range(len(space.graphs)), key=lambda r: len(space.graphs[r].ops))
    graph, fixed = space.graphs[region], space.fixed_rules(region)
    assert set(fixed) == {0, 1}
    k = next(k for k, op in enumerate(graph.ops) if op.target == "aten.softmax.int")
    assert (fixed[0][k], fixed[1][k]) == (("d0",), ("d0/2",))
    for slot, layouts in space.stored[region].items():
        is_expert = ".experts." in graph.slots[slot].name
        assert {layout[1] for layout in layouts} == {Shard(0) if is_expert else INVARIANT}
        # Experts are no longer for tp to shard.
        assert all(layout[2] != Shard(0) for layout in layouts) or not is_expert
    crossing = {layout for (layout,) in space.output_layouts(region, AxisRole.TENSOR)}
    assert {layout[:2] for layout in crossing} == {(Shard(0), Shard(0, 2))}


def test_tp_does_not_shard_rows_whose_number_is_unknown() -> None:
    space = space_of(1, 2, 2)
    region = max(range(len(space.graphs)), key=lambda r: len(space.graphs[r].ops))
    graph, away = space.graphs[region], dispatched_values(space.graphs[region])
    for op, (_, on_tp) in zip(graph.ops, space.rules_of(region, AxisRole.SEQUENCE), strict=True):
        for rule in on_tp:
            types = (*rule.inputs, *rule.outputs)
            cut = {v for v, t in zip((*op.operands, *op.outputs), types, strict=True) if t.dim == 0}
            assert away.isdisjoint(cut), (op, rule)


def test_no_conversion_leads_to_the_experts() -> None:
    with pytest.raises(AssertionError, match="only combine"):
        axis_conversion(Shard(0), Experts(), 2)
