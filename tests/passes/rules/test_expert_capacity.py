"""Experts with a capacity: which products are theirs, what may go to them, what is taken."""

from functools import cache

import pytest
import torch
from support.models.experts import BATCH, EXPERTS, SEQUENCE, WIDTH, capacity_model
from torch import Tensor, nn

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.ir.op_graph import FoldedGraph, OpGraph
from meshfold.ir.spmd import Shard
from meshfold.passes.region.typing import MeshSearch
from meshfold.passes.rules.expert_axis import shared_experts
from meshfold.passes.rules.expert_capacity import capacity_rules, expert_products
from meshfold.passes.rules.table import AxisRule, region_rules


@cache
def graph_of(kind: str) -> FoldedGraph:
    return capture(*capacity_model(kind)).graph


def layer_of(folded: FoldedGraph) -> OpGraph:
    """The region with the experts."""
    return next(r.graph for r in folded.regions if expert_products(r.graph).labels)


def rules_of(graph: OpGraph, size: int) -> list[tuple[AxisRule, ...]]:
    return [of_op for (of_op,) in region_rules(graph, (size,))]


@pytest.mark.parametrize(
    ("kind", "target", "label", "number"),
    [
        ("gshard", "aten.einsum.default", "e", EXPERTS),
        ("switch", "aten.bmm.default", "d0", EXPERTS),
        ("prototypes", "aten.einsum.default", "e", EXPERTS // 2),
    ],
)
def test_products_with_a_matrix_per_expert(kind: str, target: str, label: str, number: int) -> None:
    graph = layer_of(graph_of(kind))
    found = expert_products(graph)
    assert [graph.ops[k].target for k in found.labels] == [target] * 2
    assert set(found.labels.values()) == {label}
    assert shared_experts(graph_of(kind)) == {number}


class NoExperts(nn.Module):
    """Products of activations, with one matrix, with a matrix that is no parameter, and a weight
    for every channel."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.each = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.register_buffer("fixed", torch.ones(EXPERTS, SEQUENCE, SEQUENCE))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.bmm(x, x.transpose(1, 2)) @ self.line(x)
        y = torch.bmm(self.fixed, y)
        return self.each(y.transpose(1, 2)).sum()


def test_other_products_have_no_experts() -> None:
    folded = capture(NoExperts(), {"x": torch.randn(EXPERTS, SEQUENCE, WIDTH)}).graph
    assert shared_experts(folded) == frozenset()


def test_products_go_to_the_experts_and_what_is_between_may() -> None:
    graph = layer_of(graph_of("gshard"))
    open_rules = rules_of(graph, 4)
    chosen = [of_op[0] for of_op in open_rules]
    rules, weights = capacity_rules(graph, chosen, open_rules)
    for k in expert_products(graph).labels:
        assert [rule.name for rule in rules[k]] == ["e"]
    assert {graph.slots[v].name for v in weights} == {"experts.up", "experts.down"}
    assert set(weights.values()) == {Shard(0)}
    (relu,) = (k for k, op in enumerate(graph.ops) if op.target == "aten.relu.default")
    assert [rule.name for rule in rules[relu]] == ["I", "d0"]
    # Dispatch and combine, which read or make what has no experts, stay with the batch.
    einsums = [k for k, op in enumerate(graph.ops) if op.target == "aten.einsum.default"]
    assert [len(rules[k]) for k in einsums] == [1] * 4
    assert rules[einsums[0]] == rules[einsums[-1]] == (chosen[einsums[0]],)


def test_without_a_division_of_the_experts_nothing_leaves_the_batch() -> None:
    graph = layer_of(graph_of("gshard"))
    open_rules = rules_of(graph, 3)
    chosen = [of_op[0] for of_op in open_rules]
    rules, weights = capacity_rules(graph, chosen, open_rules)
    assert rules == tuple((rule,) for rule in chosen) and not weights


def test_rows_leave_the_batch_for_the_experts_by_one_all_to_all_each_way() -> None:
    folded = graph_of("gshard")
    cluster = resolve_cluster("local-cpu", 4)
    mesh = build_mesh(cluster, 2, 1, ep=2)
    search = MeshSearch(folded, cluster, mesh, BATCH)
    typed = search.solve(zero=0)
    region = next(r for r, g in enumerate(search.graphs) if expert_products(g).labels)
    moved = [
        (c.source, c.target, c.forward, c.backward)
        for c in typed.prices[region].conversions
        if any("all_to_all" in kind for kind in (*c.forward, *c.backward))
    ]
    batch, experts = (Shard(1), Shard(1, 2)), (Shard(1), Shard(0))
    assert [(source, target) for source, target, _, _ in moved] == [
        (batch, experts),
        (experts, batch),
    ]
