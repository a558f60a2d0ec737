"""Rules of a context parallel axis: nested shards, unsharded parameters, the optimum after
pruning."""

from functools import cache

import pytest
import torch
from support.models.hugging_face import BATCH, meta_llama, tiny_model
from torch import Tensor, nn

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.ir.op_graph import FoldedGraph, SlotKind
from meshfold.ir.spmd import Shard, SpmdType
from meshfold.passes.region.parameter_tables import Prices
from meshfold.passes.region.search import RegionProblem
from meshfold.passes.region.typing import MeshSearch
from meshfold.passes.rules import context_axis as context_rules
from meshfold.passes.rules.context_axis import ShardOf, moved_inside
from meshfold.passes.rules.table import region_rules


@cache
def graph_of(family: str) -> FoldedGraph:
    model, batch = tiny_model(family)
    return capture(model, batch).graph


def search_of(family: str) -> MeshSearch:
    cluster = resolve_cluster("dgx-h100", 8)
    return MeshSearch(graph_of(family), cluster, build_mesh(cluster, 2, 2, cp=2), BATCH)


def largest_region(graph: FoldedGraph) -> int:
    return max(range(len(graph.regions)), key=lambda r: len(graph.regions[r].graph.ops))


def test_rules_move_inside_of_the_outer_shards_where_that_divides() -> None:
    graph = graph_of("bert").regions[1].graph
    linear = next(k for k, op in enumerate(graph.ops) if op.target == "aten.linear.default")

    def names(sizes: tuple[int, int]) -> tuple[SpmdType, set[str]]:
        table = region_rules(graph, sizes)
        moved = moved_inside(graph, table, sizes, inner=0, outer=1)
        assert moved[linear][1] == table[linear][1]
        (rows,) = (r for r in moved[linear][0] if r.name.split("/")[0] == "d1")
        assert rows.inputs[0] == rows.outputs[0]
        return rows.inputs[0], {r.name for r in moved[linear][0]}

    rows, found = names((2, 2))
    assert rows == Shard(1, 2) and {"I", "R", "d0/2", "d1/2"} <= found and "d1" not in found
    # 8 rows do not divide over 4 x 4 ranks.
    rows, _ = names((4, 4))
    assert rows == Shard(1)


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


class CausalLayer(nn.Module):
    """Attention of 16 heads that share 8 key heads, as torch alone writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(width, n * width // 16) for n in (16, 8, 8))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = (linear(x).unflatten(-1, (-1, 128)).transpose(1, 2) for linear in self.qkv)
        made = nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return x + self.out(made.transpose(1, 2).flatten(2))


class CausalStack(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CausalLayer(width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@cache
def causal_stack(rows: int) -> FoldedGraph:
    with torch.device("meta"):
        model, x = CausalStack(2048), torch.empty(1, rows, 2048)
    return capture(model.to(torch.bfloat16), {"x": x.to(torch.bfloat16)}).graph


@pytest.mark.parametrize(
    ("rows", "tp", "expected"),
    [
        (2**17, 1, "h"),  # 16 heads for 8 ranks: heads for rows, balanced
        (2**17, 8, "ring"),  # of two heads a rank there are none to trade
        (2**10, 8, "s"),  # visits too short to hide anything
    ],
)
def test_long_sequences_have_keys_go_round_where_heads_do_not_divide(
    rows: int, tp: int, expected: str
) -> None:
    graph, cluster = causal_stack(rows), resolve_cluster("dgx-h100", 8 * tp)
    search = MeshSearch(graph, cluster, build_mesh(cluster, 1, tp, cp=8), 1)
    typed = search.solve(zero=0, mode="sequence" if tp > 1 else "tensor")
    # The layers between the first, which gets its input whole, and the loss.
    pairs = zip(graph.regions[1].graph.ops, typed.typings[1].ops, strict=True)
    (found,) = (typing.rules[0] for op, typing in pairs if "attention" in op.target)
    assert found.partition("/")[0] == expected


def test_keys_go_round_on_cp_alone() -> None:
    search = search_of("bert")
    for graph, table in zip(search.graphs, search.space.rules, strict=True):
        for op, (dp, cp, tp) in zip(graph.ops, table, strict=True):
            assert not any(rule.name.startswith("ring") for rule in (*dp, *tp))
            rings = [rule.name for rule in cp if rule.name.startswith("ring")]
            assert rings == (["ring/2"] if "attention" in op.target else [])


class _Everything(frozenset[ShardOf]):
    def __contains__(self, item: object) -> bool:
        return True


def _all_rules(graph, rules):
    yield from map(tuple, rules)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_the_optimum_survives_what_shards_no_product(
    family: str, sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = largest_region(graph_of(family))
    pruned = search_of(family).problem(region, "sequence" if sequence_parallel else "tensor")
    monkeypatch.setattr(context_rules, "shards_of_products", lambda *_: _Everything())
    everything = search_of(family).problem(region, "sequence" if sequence_parallel else "tensor")
    check_pruned(pruned, everything)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_where_bytes_decide_the_optimum_survives_all_pruning(
    sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum computed from an unsharded value saves a launch at most: none where values are
    large."""
    cluster = resolve_cluster("dgx-h100", 8)
    graph = capture(*meta_llama(8192, 2)).graph
    region = largest_region(graph)

    def problem() -> RegionProblem:
        search = MeshSearch(graph, cluster, build_mesh(cluster, 2, 2, cp=2), 2)
        return search.problem(region, "sequence" if sequence_parallel else "tensor")

    pruned = problem()
    monkeypatch.setattr(context_rules, "_with_sums", _all_rules)
    monkeypatch.setattr(context_rules, "moved_inside", with_both)
    check_pruned(pruned, problem())


_moved_inside = moved_inside


def with_both(graph, table, sizes, *, inner, outer):
    """Rules inside and outside of the outer axis's shards."""
    moved = _moved_inside(graph, table, sizes, inner=inner, outer=outer)
    both = []
    for old, new in zip(table, moved, strict=True):
        rules = {(r.inputs, r.outputs): r for r in (*old[inner], *new[inner])}
        both.append((*old[:inner], tuple(rules.values()), *old[inner + 1 :]))
    return tuple(both)


def check_pruned(pruned: RegionProblem, everything: RegionProblem) -> None:
    assert sum(map(len, pruned.domains)) < sum(map(len, everything.domains))
    prices = Prices(used_s_per_byte=1e-9)
    found, best = pruned.solve(prices), everything.solve(prices)
    assert found is not None and best is not None
    # Of fewer layouts more can be shared exactly, see passes/region/factors.py: it may come out
    # lower.
    assert best.objective_s * 0.999 < found.objective_s <= best.objective_s * (1 + 1e-9)
