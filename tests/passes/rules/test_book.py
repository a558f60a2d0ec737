"""Rules kept for all sizes of axis: each is what it is alone."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.hugging_face import families, tiny_model

from meshfold.capture.pipeline import capture
from meshfold.ir.op_graph import OpGraph
from meshfold.passes.rules.book import RuleBook
from meshfold.passes.rules.ops.shards import Divisions
from meshfold.passes.rules.table import region_rules

SIZES = (1, 2, 3, 4, 5, 6, 8, 16, 32)


@cache
def graphs_of(family: str) -> list[OpGraph]:
    model, batch = tiny_model(family)
    return [region.graph for region in capture(model, batch).graph.regions]


@pytest.mark.parametrize("family", families("llama", without=("bert", "vit")))
@settings(deadline=None, max_examples=10)
@given(sizes=st.permutations(SIZES))
def test_in_whatever_order_sizes_are_asked_for(family: str, sizes: list[int]) -> None:
    graphs = graphs_of(family)
    book = RuleBook(graphs)
    for size in sizes:
        for r, graph in enumerate(graphs):
            assert book.table(r, (size,)) == region_rules(graph, (size,))


def test_a_table_has_the_axes_in_order() -> None:
    graphs = graphs_of("llama")
    book = RuleBook(graphs)
    for r, graph in enumerate(graphs):
        assert book.table(r, (4, 2, 4)) == region_rules(graph, (4, 2, 4))
        assert book.table(r, ()) == region_rules(graph, ())


def test_sizes_that_divide_alike_have_one_table() -> None:
    graphs = graphs_of("llama")
    book = RuleBook(graphs)
    layer = max(range(len(graphs)), key=lambda r: len(graphs[r].ops))
    assert book.rules(layer, 1009) is book.rules(layer, 2003)
    assert book.rules(layer, 2) is not book.rules(layer, 1009)
    assert book.rules(layer, 1) is not book.rules(layer, 1009)


@given(
    st.lists(st.tuples(st.integers(0, 64), st.integers(1, 6)), max_size=12),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_sizes_agree_when_every_answer_is_the_same(questions, first, second) -> None:
    asked, other = Divisions(first), Divisions(second)
    same = [asked(*q) == other(*q) for q in questions]
    if asked.agree_with(second):
        assert all(same)
    elif 1 not in (first, second):
        assert not all(same)


def test_an_op_without_rules_is_named() -> None:
    graphs = graphs_of("llama")
    assert RuleBook(graphs).fallback_ops(0) == ()
