"""Folding: what becomes one region, what does not, and that nothing is lost."""

import dataclasses

import pytest
from support.graphs.expand import expand
from support.graphs.fold import GraphBuilder, mlp_stack

from meshfold.ir.op_graph import FoldedGraph, Hole, Ref, SlotKind, SourceKind
from meshfold.passes.fold.assemble import fingerprint, region_name
from meshfold.passes.fold.find_regions import fold


def runs(graph: FoldedGraph) -> list[tuple[str, int]]:
    return [(graph.regions[r].name, count) for r, _, count in graph.runs]


def test_layers_become_instances_of_one_region() -> None:
    flat, stacks = mlp_stack(6)
    graph = fold(flat, stacks)
    assert runs(graph) == [("A", 1), ("B", 6), ("C", 1)]
    region = graph.regions[1].graph
    assert [s.name for s in region.slots if s.kind is SlotKind.PARAMETER] == [
        "up.weight",
        "down.weight",
    ]
    for k, instance in enumerate(graph.instances[1:7]):
        assert instance.scope == f"layers.{k}"
        names = [s.name for s in instance.sources if s.kind is SourceKind.PARAMETER]
        assert names == [f"layers.{k}.up.weight", f"layers.{k}.down.weight"]
    assert [op.scope for op in region.ops] == ["up", "", "down", "", ""]


@pytest.mark.parametrize("wide_at", [0, 2, 5])
def test_an_odd_layer_is_a_region_of_its_own(wide_at: int) -> None:
    flat, stacks = mlp_stack(6, wide_at=wide_at)
    graph = fold(flat, stacks)
    counts = [n for n in (wide_at, 1, 5 - wide_at) if n]
    assert [count for _, count in runs(graph)] == [1, *counts, 1]
    assert expand(graph) == flat


def test_floats_that_differ_are_holes_and_equal_ones_stay() -> None:
    flat, stacks = mlp_stack(3, scales=(0.1, 0.2, 0.3))
    graph = fold(flat, stacks)
    assert graph.regions[1].graph.ops[3].args[1] == Hole(0)
    assert [i.floats for i in graph.instances] == [(), (0.1,), (0.2,), (0.3,), ()]
    equal = fold(*mlp_stack(3)).regions[1].graph
    assert equal.ops[3].args[1] == 0.5


def test_nan_is_equal_to_itself() -> None:
    graph = fold(*mlp_stack(3, scales=(float("nan"),) * 3))
    assert graph.instances[1].floats == ()


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("scales", [(), (0.1, 0.2, 0.3, 0.4, 0.5)])
@pytest.mark.parametrize("with_scopes", [True, False])
def test_expand_is_the_inverse(depth: int, scales: tuple[float, ...], with_scopes: bool) -> None:
    flat, stacks = mlp_stack(depth, scales=scales, with_scopes=with_scopes)
    graph = fold(flat, stacks)
    assert expand(graph) == flat
    assert graph.num_ops == len(flat.regions[0].graph.ops)


def test_a_single_layer_stays_flat() -> None:
    graph = fold(*mlp_stack(1))
    assert runs(graph) == [("A", 1)]


def test_equal_towers_are_opened() -> None:
    """Two equal stacks of layers under one scope each: layers are the regions, not towers."""
    b = GraphBuilder()
    h = b.slot("x")
    weights = [[b.parameter(f"tower{t}.layers.{k}.weight") for k in range(4)] for t in range(2)]
    b.values[h] = dataclasses.replace(b.values[h], requires_grad=True)
    for t, row in enumerate(weights):
        for k, weight in enumerate(row):
            stack = (f"tower{t}", f"tower{t}.layers.{k}")
            h = b.op("aten.linear.default", Ref(h), Ref(weight), stack=stack)
            for target in ("aten.relu.default", "aten.exp.default", "aten.sin.default"):
                h = b.op(target, Ref(h), stack=stack)
    flat = b.flat([h])
    graph = fold(flat, tuple(b.stacks))
    assert runs(graph) == [("A", 8)]
    assert expand(graph) == flat


def test_a_module_called_twice_in_a_row_is_two_instances() -> None:
    b = GraphBuilder()
    h = b.slot("x", requires_grad=True)
    weight = b.parameter("layer.weight")
    for call in ("layer", "layer@1", "layer@2"):
        h = b.op("aten.linear.default", Ref(h), Ref(weight), stack=(call,))
        for target in ("aten.relu.default", "aten.exp.default", "aten.sin.default"):
            h = b.op(target, Ref(h), stack=(call,))
    graph = fold(b.flat([h]), tuple(b.stacks))
    assert runs(graph) == [("A", 3)]
    assert {i.scope for i in graph.instances} == {"layer"}
    assert {s.name for i in graph.instances for s in i.sources if s.name} == {"layer.weight", "x"}


def test_outputs_that_are_inputs_and_repeated_outputs_survive() -> None:
    b = GraphBuilder()
    x = b.slot("x")
    y = b.op("aten.exp.default", Ref(x))
    flat = b.flat([x, y])
    flat = dataclasses.replace(
        flat, outputs=(*flat.outputs, dataclasses.replace(flat.outputs[1], name="again"))
    )
    graph = fold(flat, tuple(b.stacks))
    assert graph.outputs[0].source.kind is SourceKind.INPUT
    assert expand(graph) == flat


def test_buffer_updates_stay_with_their_op() -> None:
    b = GraphBuilder()
    state = b.slot("state", SlotKind.BUFFER)
    x = b.op("aten.add.Scalar", Ref(state), 1)
    b.mutations.append((state, x))
    flat = b.flat([x])
    graph = fold(flat, tuple(b.stacks))
    assert graph.regions[0].graph.mutations == ((0, 1),)
    assert expand(graph) == flat


def test_fingerprint_sees_the_program_and_not_the_messages() -> None:
    graph = fold(*mlp_stack(3))
    assert fingerprint(graph) == fingerprint(dataclasses.replace(graph, notes=("hello",)))
    others = [
        fold(*mlp_stack(4)),
        fold(*mlp_stack(3, width=8)),
        fold(*mlp_stack(3, prefix="blocks")),
        fold(*mlp_stack(3, scales=(0.5, 0.5, 0.6))),
    ]
    assert len({fingerprint(g) for g in (graph, *others)}) == 5


def test_region_names_go_on_after_z() -> None:
    assert [region_name(k) for k in (0, 25, 26, 27, 701, 702)] == [
        "A",
        "Z",
        "AA",
        "AB",
        "ZZ",
        "AAA",
    ]
