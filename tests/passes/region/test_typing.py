"""Uniform strategies on the six families: the plans an expert would write, found from the rules."""

from collections import Counter
from functools import cache

import pytest
from support.graphs.rules import is_legal_typing
from support.models.hugging_face import BATCH, FAMILIES, families, tiny_model

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.ir.op_graph import FoldedGraph, SlotKind, SourceKind
from meshfold.ir.spmd import INVARIANT, Shard, is_legal
from meshfold.passes.region.parameter_tables import Prices
from meshfold.passes.region.typing import PRICE_LADDER, MeshSearch, ProgramTyping

LAYERED = tuple(f for f in FAMILIES if f != "t5")
"""Families whose two layers fold into one region. T5's layers differ: the first has the bias."""


@cache
def graph_of(family: str) -> FoldedGraph:
    model, batch = tiny_model(family)
    return capture(model, batch).graph


@cache
def search_on(family: str, dp: int, tp: int) -> MeshSearch:
    cluster = resolve_cluster("local-cpu", dp * tp)
    return MeshSearch(graph_of(family), cluster, build_mesh(cluster, dp, tp), BATCH)


def layer_region(family: str) -> int:
    return max(graph_of(family).runs, key=lambda run: run[2])[0]


def collectives(found: ProgramTyping, region: int) -> tuple[Counter[str], Counter[str]]:
    """Collectives of activations, forward and backward."""
    records = [c for c in found.prices[region].conversions if c.kind == "activation"]
    return (
        Counter(name for c in records for name in c.forward),
        Counter(name for c in records for name in c.backward),
    )


@pytest.mark.parametrize("family", LAYERED)
@pytest.mark.parametrize("degrees", [(1, 2), (2, 2)])
class TestOneLayer:
    def test_tensor_parallel_is_two_all_reduces_each_way(self, family, degrees):
        found = search_on(family, *degrees).solve(zero=0, mode="tensor")
        forward, backward = collectives(found, layer_region(family))
        assert forward == {"all_reduce": 2}
        assert backward == {"all_reduce": 2}

    def test_sequence_parallel_is_two_pairs_each_way(self, family, degrees):
        found = search_on(family, *degrees).solve(zero=0, mode="sequence")
        forward, backward = collectives(found, layer_region(family))
        assert forward == {"all_gather": 2, "reduce_scatter": 2}
        assert backward == {"all_gather": 2, "reduce_scatter": 2}


PAIRS = {
    "gpt2": {"c_attn": 1, "attn.c_proj": 0, "c_fc": 1, "mlp.c_proj": 0},  # stored transposed
    "llama": {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "down_proj": 1},
    "bert": {"query": 0, "key": 0, "value": 0, "attention.output.dense": 1, "intermediate": 0},
    "t5": {".q.": 0, ".k.": 0, ".v.": 0, ".o.": 1, ".wi.": 0, ".wo.": 1},
    "vit": {"q_proj": 0, "o_proj": 1, "fc1": 0, "fc2": 1},
    "mixtral": {"q_proj": 0, "o_proj": 1, "gate_up_proj": 1, "experts.down_proj": 2},
}


@pytest.mark.parametrize("family", families("gpt2", "llama"))
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_columns_then_rows(family, sequence_parallel):
    """Every product is sharded, first by columns, then by rows; GPT-2's fused qkv in blocks."""
    found = search_on(family, 1, 2).solve(
        zero=0, mode="sequence" if sequence_parallel else "tensor"
    )
    graph = graph_of(family)
    seen = set()
    for region, typing in zip(graph.regions, found.typings, strict=True):
        for slot, value, (tp,) in zip(
            region.graph.slots, region.graph.values, typing.slots, strict=False
        ):
            for part, dim in PAIRS[family].items():
                if part in slot.name and len(value.shape) > 1:
                    assert tp.dim == dim, f"{slot.name} is stored {tp}"
                    seen.add(part)
    assert seen == set(PAIRS[family])
    assert found.sharded_fraction > 0.95
    if family == "gpt2":
        layer = layer_region(family)
        names = [s.name for s in graph.regions[layer].graph.slots]
        at = names.index("attn.c_attn.weight")
        assert found.typings[layer].slots[at] == (Shard(1, 3),)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("degrees", "zero", "sequence_parallel"),
    [((2, 1), 0, False), ((2, 1), 3, False), ((2, 2), 0, True), ((2, 2), 3, True)],
)
class TestTypings:
    def test_legal_and_joined(self, family, degrees, zero, sequence_parallel):
        """Every layout is legal, what leaves a region arrives in the next, the loss is
        unsharded."""
        search = search_on(family, *degrees)
        found = search.solve(zero=zero, mode="sequence" if sequence_parallel else "tensor")
        graph, sizes = graph_of(family), search.mesh.sizes
        for region, typing in zip(graph.regions, found.typings, strict=True):
            for k, chosen in enumerate(typing.ops):
                assert is_legal_typing(region.graph, k, chosen, sizes)
            for i, layout in enumerate(typing.slots):
                assert is_legal(region.graph.values[i].shape, layout, sizes)
        for instance in graph.instances:
            for source, layout in zip(
                instance.sources, found.typings[instance.region].slots, strict=True
            ):
                if source.kind is SourceKind.VALUE:
                    maker = found.typings[graph.instances[source.instance].region]
                    assert maker.outputs[source.output] == layout
        (loss,) = graph.outputs
        last = found.typings[graph.instances[loss.source.instance].region]
        assert set(last.outputs[loss.source.output]) == {INVARIANT}

    def test_one_layout_per_parameter(self, family, degrees, zero, sequence_parallel):
        found = search_on(family, *degrees).solve(
            zero=zero, mode="sequence" if sequence_parallel else "tensor"
        )
        layouts: dict[str, set[object]] = {}
        for instance in graph_of(family).instances:
            for source, layout in zip(
                instance.sources, found.typings[instance.region].slots, strict=True
            ):
                if source.kind is SourceKind.PARAMETER:
                    layouts.setdefault(source.name, set()).add(layout)
        assert all(len(found_in) == 1 for found_in in layouts.values())

    def test_data_parallel_keeps_the_batch_sharded(self, family, degrees, zero, sequence_parallel):
        """No activation is gathered over dp; only sums of the loss cross it in the graph."""
        search = search_on(family, *degrees)
        found = search.solve(zero=zero, mode="sequence" if sequence_parallel else "tensor")
        for price in found.prices:
            for record in price.conversions:
                if record.kind == "activation" and record.source[0] != record.target[0]:
                    assert record.num_bytes <= 64, record
        stored = [
            (layout[0], value.shape)
            for region, typing in zip(graph_of(family).regions, found.typings, strict=True)
            for slot, value, layout in zip(
                region.graph.slots, region.graph.values, typing.slots, strict=False
            )
            if slot.kind is SlotKind.PARAMETER
        ]
        if zero == 0:
            assert all(t == INVARIANT for t, _ in stored)
        else:
            assert all(t.is_shard for t, _ in stored)


def test_zero3_nests_inside_column_shards():
    found = search_on("llama", 2, 2).solve(zero=3, mode="tensor")
    region = graph_of("llama").regions[layer_region("llama")]
    at = [s.name for s in region.graph.slots].index("self_attn.q_proj.weight")
    assert found.typings[layer_region("llama")].slots[at] == (Shard(0, 2), Shard(0))


def test_what_zero3_cannot_shard_is_noted():
    graph = graph_of("vit")
    cluster = resolve_cluster("local-cpu", 4)
    search = MeshSearch(graph, cluster, build_mesh(cluster, 4, 1), BATCH)
    assert search.solve(zero=3, mode="tensor").notes == ()
    many = resolve_cluster("local-cpu", 23)
    notes = MeshSearch(graph, many, build_mesh(many, 23, 1), BATCH)
    found = notes.solve(zero=3, mode="tensor").notes
    assert any("no dim divides over 23 ranks" in note for note in found)


def test_sequence_shards_cross_boundaries():
    found = search_on("llama", 1, 2).solve(zero=0, mode="sequence")
    layer = found.typings[layer_region("llama")]
    assert layer.slots[0] == (Shard(1),)
    assert layer.outputs == ((Shard(1),),)


def test_nothing_to_shard_has_fraction_zero():
    """Eight heads leave most of 23 ranks without one."""
    cluster = resolve_cluster("local-cpu", 23)
    search = MeshSearch(graph_of("vit"), cluster, build_mesh(cluster, 1, 23), BATCH)
    assert search.solve(zero=0, mode="tensor").sharded_fraction == 0.0


def test_every_op_of_the_families_has_a_rule():
    for family in FAMILIES:
        found = search_on(family, 1, 2).solve(zero=0, mode="tensor")
        assert all(ops == () for ops in found.fallback_ops), family


@pytest.mark.parametrize("family", FAMILIES)
def test_elimination_stays_small(family):
    search = search_on(family, 1, 2)
    for region in range(len(graph_of(family).regions)):
        (optimum,) = search.problem(region, "sequence").optima([Prices()])
        assert optimum is not None
        assert optimum.found.width <= 4
        assert optimum.found.largest_table <= 500_000


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_joint_search_finds_the_same(family):
    """Following the batch first loses nothing against searching both axes at once."""
    search = search_on(family, 2, 2)
    prices = Prices(used_s_per_byte=1e-6)
    for region in range(len(graph_of(family).regions)):
        first, joint = (
            search.problem(region, "sequence", joint=joint).solve(prices) for joint in (False, True)
        )
        assert first is not None and joint is not None
        assert first.objective_s == pytest.approx(joint.objective_s, rel=1e-3)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_tp_in_the_role_of_data_goes_on_with_the_batch(family):
    """Parameters unsharded, the batch of 4 in quarters, gradients reduced over both axes."""
    found = search_on(family, 2, 2).solve(zero=0, mode="data")
    region = layer_region(family)
    graph, typing = graph_of(family).regions[region].graph, found.typings[region]
    activations = [
        layout
        for op, of_op in zip(graph.ops, typing.ops, strict=True)
        for v, layout in zip(op.outputs, of_op.outputs, strict=True)
        if graph.values[v].requires_grad
    ]
    assert activations and all(layout == (Shard(0), Shard(0, 2)) for layout in activations)
    stored = [x for s, x in zip(graph.slots, typing.slots, strict=True) if s.kind == "parameter"]
    assert stored and all(layout == (INVARIANT, INVARIANT) for layout in stored)
    assert not any(collectives(found, region))
    assert found.sharded_fraction == 0.0


def test_a_batch_that_does_not_divide_twice_runs_unsharded_on_tp():
    found = search_on("llama", 4, 2).solve(zero=0, mode="data")
    types = {t.outputs[0][1].kind for typing in found.typings for t in typing.ops}
    assert types == {"I"}


def test_without_a_dp_axis_the_batch_is_followed_on_tp():
    data = search_on("bert", 2, 1).solve(zero=0)
    found = search_on("bert", 1, 2).solve(zero=0, mode="data")
    assert [t.outputs for t in found.typings] == [t.outputs for t in data.typings]
    for mine, theirs in zip(found.prices, data.prices, strict=True):
        assert mine.forward_s == pytest.approx(theirs.forward_s)
        assert mine.reduce_s["tp"] == pytest.approx(theirs.reduce_s["dp"])


def test_same_input_same_typing():
    cluster = resolve_cluster("local-cpu", 4)
    mesh = build_mesh(cluster, 2, 2)
    runs = [
        MeshSearch(graph_of("bert"), cluster, mesh, BATCH).solve(zero=3, mode="sequence")
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "mixtral"])
@pytest.mark.parametrize("degrees", [(1, 4), (2, 2)], ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_prices_solved_together_give_what_each_gives_alone(family, degrees, sequence_parallel):
    """To the last bit: the sums are formed in the same order."""
    search = search_on(family, *degrees)
    prices = [Prices(used_s_per_byte=price) for price in PRICE_LADDER]
    for r in range(len(search.graphs)):
        problem = search.problem(r, "sequence" if sequence_parallel else "tensor")
        together = problem.optima(prices)
        for one, price in zip(together, prices, strict=True):
            (alone,) = problem.optima([price])
            assert one is not None and alone is not None
            assert one.solution() == alone.solution()
            assert (one.slots, one.prices) == (alone.slots, price)
