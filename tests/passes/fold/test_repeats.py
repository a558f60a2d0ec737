"""Tandem repeats without any help from module scopes."""

import pytest
from support.graphs.expand import expand
from support.graphs.fold import GraphBuilder

from meshfold.ir.op_graph import FoldedGraph, Ref
from meshfold.passes.fold.canonical_form import flat_index
from meshfold.passes.fold.find_regions import fold
from meshfold.passes.fold.repeats import repeat_spans

LAYER = ("relu", "exp", "sin", "cos", "tanh", "neg", "abs", "sqrt", "log", "erf")


def functional(depth: int, odd: int = -1, lead: int = 3) -> FoldedGraph:
    """`depth` layers of a linear and ten unary ops, after `lead` ops; no scopes."""
    b = GraphBuilder()
    h = b.slot("x", requires_grad=True)
    weights = [b.parameter(f"weights.{k}") for k in range(depth)]
    for k in range(lead):
        h = b.op(f"aten.lead{k}.default", Ref(h))
    for k, weight in enumerate(weights):
        h = b.op("aten.linear.default", Ref(h), Ref(weight))
        for name in reversed(LAYER) if k == odd else LAYER:
            h = b.op(f"aten.{name}.default", Ref(h))
    return b.flat([h])


def folded(flat: FoldedGraph) -> FoldedGraph:
    return fold(flat, ((),) * len(flat.regions[0].graph.ops))


def test_layers_are_found_without_scopes() -> None:
    flat = functional(6)
    graph = folded(flat)
    assert [count for _, _, count in graph.runs] == [1, 6]
    assert len(graph.regions[1].graph.ops) == 1 + len(LAYER)
    assert expand(graph) == flat


@pytest.mark.parametrize("odd", [0, 3, 7])
def test_both_sides_of_an_odd_layer_are_found(odd: int) -> None:
    flat = functional(8, odd=odd)
    graph = folded(flat)
    assert sum(count for _, _, count in graph.runs if count > 1) == 7
    assert expand(graph) == flat


def test_nothing_repeats() -> None:
    flat = functional(1)
    (cut,) = repeat_spans(flat_index(flat.regions[0].graph, frozenset()))
    assert (cut.start, cut.stop) == (0, len(flat.regions[0].graph.ops))


def test_equal_symbols_with_other_wiring_are_not_one_region() -> None:
    """Layers that read the value before last: same ops and shapes, other wires."""
    b = GraphBuilder()
    h = b.slot("x", requires_grad=True)
    early = h
    weights = [b.parameter(f"weights.{k}") for k in range(4)]
    for k, weight in enumerate(weights):
        h = b.op("aten.linear.default", Ref(h), Ref(weight))
        first = h
        for name in LAYER:
            h = b.op(f"aten.{name}.default", Ref(h))
        h = b.op("aten.add.Tensor", Ref(h), Ref(first if k % 2 else early))
        early = h
    flat = b.flat([h])
    graph = folded(flat)
    assert max(count for _, _, count in graph.runs) < 4
    assert expand(graph) == flat
