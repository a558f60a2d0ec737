"""Rules of a context parallel axis: nested places, whole parameters, the optimum after pruning."""

from functools import cache

import pytest
from support_models import BATCH, tiny_model

from meshfold.capture import capture
from meshfold.cost_models.devices import resolve_cluster
from meshfold.cost_models.meshes import build_mesh
from meshfold.opgraph import FoldedGraph, SlotKind
from meshfold.passes import context_rules
from meshfold.passes.context_rules import ShardOf, with_rules_inside
from meshfold.passes.parameter_prices import Prices
from meshfold.passes.rules import region_rules
from meshfold.passes.uniform_search import MeshSearch
from meshfold.spmd import Shard


@cache
def graph_of(family: str) -> FoldedGraph:
    model, batch = tiny_model(family)
    return capture(model, batch).graph


def search_of(family: str) -> MeshSearch:
    cluster = resolve_cluster("dgx-h100", 8)
    return MeshSearch(graph_of(family), cluster, build_mesh(cluster, 2, 2, cp=2), BATCH)


def largest_region(graph: FoldedGraph) -> int:
    return max(range(len(graph.regions)), key=lambda r: len(graph.regions[r].graph.ops))


def test_rules_inside_start_where_the_outer_shards_end() -> None:
    graph = graph_of("bert").regions[1].graph
    sizes = (2, 2)
    table = region_rules(graph, sizes)
    wider = with_rules_inside(graph, table, sizes, inner=0, outer=1)
    linear = next(k for k, op in enumerate(graph.ops) if op.target == "aten.linear.default")
    assert {r.name for r in wider[linear][0]} - {r.name for r in table[linear][0]} >= {"d1/2"}
    (rows,) = (r for r in wider[linear][0] if r.name == "d1/2")
    assert rows.inputs[0] == rows.outputs[0] == Shard(1, 2)
    assert wider[linear][1] == table[linear][1]


@pytest.mark.parametrize("family", ["bert", "llama", "mixtral"])
def test_no_rule_on_cp_reads_a_shard_of_a_parameter(family: str) -> None:
    search = search_of(family)
    for region, table in enumerate(search.space.rules):
        graph = search.graphs[region]
        for op, per_axis in zip(graph.ops, table, strict=True):
            for rule in per_axis[1]:
                for v, t in zip(op.operands, rule.inputs, strict=True):
                    if v < len(graph.slots) and graph.slots[v].kind is SlotKind.PARAMETER:
                        assert not t.is_shard


class _Everything(frozenset[ShardOf]):
    def __contains__(self, item: object) -> bool:
        return True


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_optimum_survives_the_pruning(
    family: str, sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = largest_region(graph_of(family))
    pruned = search_of(family).problem(region, sequence_parallel=sequence_parallel)
    monkeypatch.setattr(context_rules, "shards_of_products", lambda *_: _Everything())
    everything = search_of(family).problem(region, sequence_parallel=sequence_parallel)
    assert sum(map(len, pruned.domains)) < sum(map(len, everything.domains))
    prices = Prices(used_s_per_byte=1e-9)
    found, best = pruned.solve(prices), everything.solve(prices)
    assert found is not None and best is not None
    assert found.objective_s == pytest.approx(best.objective_s, rel=1e-12)
