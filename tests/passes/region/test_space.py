"""What region searches may choose: boundaries and parameters of a context parallel axis."""

from functools import cache

import pytest
from support.models.hugging_face import BATCH, tiny_model

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.op_graph import FoldedGraph, SlotKind
from meshfold.ir.spmd import layout_text
from meshfold.passes.region.roles import AxisRole
from meshfold.passes.region.space import SearchCache, SearchSpace


@cache
def graph_of(family: str) -> FoldedGraph:
    model, batch = tiny_model(family)
    return capture(model, batch).graph


def space_of(family: str, dp: int, cp: int, tp: int) -> SearchSpace:
    cluster = resolve_cluster("local-cpu", dp * cp * tp)
    mesh = build_mesh(cluster, dp, tp, cp=cp)
    graph = graph_of(family)
    return SearchSpace(graph, CostModel(cluster, mesh), BATCH, SearchCache.of(graph), {})


@pytest.mark.parametrize(
    ("degrees", "role", "carried"),
    [
        ((1, 2, 1), AxisRole.TENSOR, "S1"),
        ((2, 2, 1), AxisRole.TENSOR, "S0,S1"),
        ((2, 2, 2), AxisRole.TENSOR, "S0,S1/2,I"),
        ((2, 2, 2), AxisRole.SEQUENCE, "S0,S1/2,S1"),
        # 8 positions do not divide over 4 x 4 ranks: tp stays without.
        ((1, 4, 4), AxisRole.SEQUENCE, "S1,I"),
        # Nor over 16 ranks of cp.
        ((1, 16, 1), AxisRole.TENSOR, "I"),
    ],
)
def test_carried_activations_are_sharded_along_the_sequence(degrees, role, carried) -> None:
    space = space_of("llama", *degrees)
    layer = space.folded.runs[1][0]
    (out,) = space.output_layouts(layer, role)
    assert [layout_text(x) for x in out] == [carried]
    assert space.slot_layouts(layer, role)[0] == out


def test_ids_enter_as_dp_has_them_and_the_loss_leaves_unsharded() -> None:
    space = space_of("llama", 2, 2, 1)
    first = space.graphs[0].slots
    (ids,) = (i for i, slot in enumerate(first) if slot.name == "input_ids")
    assert [layout_text(x) for x in space.slot_layouts(0, AxisRole.TENSOR)[ids]] == ["S0,I"]
    *_, loss = space.output_layouts(len(space.graphs) - 1, AxisRole.TENSOR)
    assert [layout_text(x) for x in loss] == ["I,I"]


def test_parameters_are_stored_unsharded_on_cp() -> None:
    space = space_of("llama", 2, 2, 2)
    layouts = [
        layout
        for region, graph in enumerate(space.graphs)
        for slot, allowed in zip(
            graph.slots, space.slot_layouts(region, AxisRole.TENSOR), strict=True
        )
        if slot.kind is SlotKind.PARAMETER
        for layout in allowed
    ]
    assert {layout_text(x[:2]) for x in layouts} == {"I,I"}
    assert any(x[2].is_shard for x in layouts)
