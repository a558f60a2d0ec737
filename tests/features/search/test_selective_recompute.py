"""What is recomputed under selective recomputation, on small graphs and on the layers of models."""

from dataclasses import replace

import pytest
import torch
from support.graphs.op_graphs import GraphBuilder, costs_on, mlp
from support.models.hugging_face import BATCH, HEADS, HIDDEN, SEQUENCE, tiny_model
from support.models.recompute import layer_regions
from support.programs.prices import price_region

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.ir.op_graph import OpGraph
from meshfold.ir.spmd import INVARIANT, PARTIAL, REPLICATE, Layout, Shard
from meshfold.ir.strategy import RegionTyping, UniformStrategy
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.graph.typed import layouts_of_values
from meshfold.passes.memory.region import MemoryModel
from meshfold.passes.price.conversions import conversion_cost
from meshfold.passes.price.recompute import Recomputed, full_recompute, selective_recompute
from meshfold.passes.region.typing import MeshSearch
from meshfold.passes.rules.table import AxisRule, region_rules, typing_of

I, R, P, S0 = (INVARIANT,), (REPLICATE,), (PARTIAL,), (Shard(0),)  # noqa: E741  letters of the types
Rules = list[tuple[AxisRule, ...]]
PROBER = OpProber()


def typed(
    graph: OpGraph, names: list[str], slots: list[Layout], out: Layout
) -> tuple[RegionTyping, Rules]:
    """On a tp axis of 2: one rule name per op."""
    tables = region_rules(graph, (2,))
    rules = [
        (next(r for r in table[0] if r.name == name),)
        for table, name in zip(tables, names, strict=True)
    ]
    ops = tuple(typing_of(graph, k, r) for k, r in enumerate(rules))
    return RegionTyping(tuple(slots), ops, (out,), "selective"), rules


def recomputed_of(graph: OpGraph, typing: RegionTyping) -> Recomputed:
    mesh, costs, _ = costs_on(1, 2)
    return selective_recompute(graph, typing, layouts_of_values(graph, typing), costs)


def added_s(graph: OpGraph, typing: RegionTyping, rules: Rules) -> tuple[float, float]:
    """What recomputation adds to the backward: compute, conversions."""
    mesh, costs, _ = costs_on(1, 2)
    again, plain = (
        price_region(graph, replace(typing, recompute=r), rules, costs)
        for r in (typing.recompute, "none")
    )
    assert again.forward_s == plain.forward_s
    assert again.graph_forward_s == plain.graph_forward_s
    return again.backward_s - plain.backward_s, again.graph_backward_s - plain.graph_backward_s


def test_a_product_is_not_recomputed_nor_is_its_reduction() -> None:
    graph = mlp(residual=True)
    typing, rules = typed(graph, ["k", "I", "o", "I"], [(Shard(1),), (Shard(1),), S0], I)
    mesh, costs, _ = costs_on(1, 2)
    again = recomputed_of(graph, typing)
    assert again.ops == {1}
    relu_s, moved_s = added_s(graph, typing, rules)
    hidden = graph.values[graph.ops[0].outputs[0]]
    summed = conversion_cost(hidden, P, I, costs)
    assert summed.forward_s > 0 and moved_s == pytest.approx(0.0)
    assert relu_s == pytest.approx(costs.compute_s(0.0, 2 * hidden.num_bytes, "float32"))
    full_s, repeated_s = added_s(graph, replace(typing, recompute="full"), rules)
    assert full_s > relu_s and repeated_s == pytest.approx(summed.forward_s)


def test_a_gather_in_front_of_a_product_is_recomputed() -> None:
    b = GraphBuilder()
    x, up = b.slot(4, 8), b.parameter(16, 8)
    graph = b.build(b.linear(b.relu(x), up))
    typing, rules = typed(graph, ["d0", "o"], [S0, S0], (Shard(1),))
    mesh, costs, _ = costs_on(1, 2)
    gathered = conversion_cost(graph.values[2], S0, R, costs)
    assert gathered.forward == ("all_gather",)
    assert recomputed_of(graph, typing).ops == {0}
    assert added_s(graph, typing, rules)[1] == pytest.approx(gathered.forward_s)


def test_between_products_nothing_is_recomputed() -> None:
    b = GraphBuilder()
    x, first, second = b.slot(4, 8), b.parameter(8, 8), b.parameter(8, 8)
    graph = b.build(b.linear(b.linear(x, first), second))
    typing, rules = typed(graph, ["I", "I"], [I, I, I], I)
    assert recomputed_of(graph, typing).ops == frozenset()
    assert added_s(graph, typing, rules) == (0.0, 0.0)


def test_without_products_all_is_recomputed() -> None:
    b = GraphBuilder()
    graph = b.build(b.relu(b.relu(b.slot(4, 8))))
    typing, _ = typed(graph, ["I", "I"], [I], I)
    assert recomputed_of(graph, typing) == full_recompute(graph, typing)


PARALLEL = UniformStrategy(tp=2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        ("gpt2", PARALLEL),
        ("llama", UniformStrategy()),
        ("bert", PARALLEL),
        ("t5", UniformStrategy()),
        ("vit", UniformStrategy()),
        ("mixtral", PARALLEL),
    ],
    ids=lambda x: x if isinstance(x, str) else x.label,
)
def test_selective_is_between_none_and_full(family: str, strategy: UniformStrategy) -> None:
    """Kept bytes fall, the backward takes longer."""
    graph = capture(*tiny_model(family, layers=3)).graph
    cluster = resolve_cluster("dgx-v100", strategy.tp)
    mesh = build_mesh(cluster, 1, strategy.tp)
    search = MeshSearch(graph, cluster, mesh, BATCH)
    typings = search.solve(zero=0, mode=strategy.tp_mode).typings
    solutions = search.solutions(strategy.tp_mode)
    for r in sorted(layer_regions(graph)):
        floats = next(i.floats for i in graph.instances if i.region == r)
        kept, backward_s = [], []
        for recompute in ("none", "selective", "full"):
            typing = replace(typings[r], recompute=recompute)
            price = solutions[r].pricer.price(typing.slots, typing.recompute)
            model = MemoryModel(search.costs, PROBER)
            memory = model.region(graph.regions[r].graph, typing, floats)
            kept.append(memory.saved_bytes)
            backward_s.append(price.backward_s + price.graph_backward_s)
        assert kept[0] > kept[1] > kept[2]
        assert backward_s[0] < backward_s[1] < backward_s[2]


def test_a_llama_layer_keeps_the_results_of_its_products() -> None:
    """Korthikanti et al. 2022 count likewise: what no backward reads is not saved."""
    graph = capture(*tiny_model("llama", layers=3, dtype=torch.float32)).graph
    mesh = build_mesh(resolve_cluster("local-cpu"), 1, 1)
    search = MeshSearch(graph, resolve_cluster("local-cpu"), mesh, BATCH)
    (r,) = layer_regions(graph)
    typing = search.solve(zero=0, mode="tensor").typings[r]
    floats = next(i.floats for i in graph.instances if i.region == r)
    selective = replace(typing, recompute="selective")
    memory = MemoryModel(search.costs, PROBER).region(graph.regions[r].graph, selective, floats)
    # Per token q, k, v (4 of 8 heads), attention, its projection, gate and up; not down, which
    # only the residual sum reads.
    per_token = HIDDEN + 2 * HIDDEN // 2 + HIDDEN + HIDDEN + 64 + 64
    attention = BATCH * HEADS * SEQUENCE  # log-sum-exp
    assert memory.saved_bytes == 4 * (BATCH * SEQUENCE * per_token + attention)
