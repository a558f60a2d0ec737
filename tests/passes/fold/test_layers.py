"""What repeats nowhere and is long is split into layers all the same."""

from hypothesis import given
from hypothesis import strategies as st
from support.graphs.expand import expand
from support.graphs.fold import mlp_stack

from meshfold.passes.fold.canonical_form import flat_index
from meshfold.passes.fold.find_regions import fold
from meshfold.passes.fold.layers import LEAST_SHARE, LONG_OPS, layer_spans

OPS_PER_LAYER = 5


def test_different_layers_are_regions_of_their_own_and_the_program_says_so() -> None:
    depth = LONG_OPS // OPS_PER_LAYER + 1
    flat, stacks = mlp_stack(depth, inner_widths=range(8, 8 + depth))
    graph = fold(flat, stacks)
    scopes = [i.scope for i in graph.instances]
    assert scopes == ["stem", *(f"layers.{k}" for k in range(depth)), ""]
    assert len(graph.regions) == len(scopes)
    assert expand(graph).regions == flat.regions
    (note,) = graph.notes
    total = graph.num_ops
    assert note.startswith(f"folding did not help: {total} of {total} ops are different")


def test_a_program_that_folds_says_nothing() -> None:
    graph = fold(*mlp_stack(LONG_OPS))
    assert graph.notes == ()
    assert len(graph.regions) == 3


def test_a_short_program_stays_one_region() -> None:
    depth = LONG_OPS // OPS_PER_LAYER - 1
    graph = fold(*mlp_stack(depth, inner_widths=range(8, 8 + depth)))
    assert len(graph.regions) == 1
    assert graph.notes == ()


def test_without_modules_boundaries_are_where_one_value_crosses() -> None:
    depth = LONG_OPS
    flat, stacks = mlp_stack(depth, inner_widths=range(8, 8 + depth), with_scopes=False)
    graph = fold(flat, stacks)
    assert len(graph.regions) > depth * OPS_PER_LAYER // LONG_OPS
    for region in graph.regions[:-1]:
        # The sum that a layer ends with is all that the next one reads.
        assert len(region.graph.outputs) == 1
        assert region.graph.ops[-1].target == "aten.add.Tensor"
        assert LONG_OPS // LEAST_SHARE <= len(region.graph.ops) <= LONG_OPS


@given(st.lists(st.integers(2, 9), min_size=1, max_size=60), st.booleans())
def test_layers_cover_every_op_once_in_order(widths: list[int], with_scopes: bool) -> None:
    flat, stacks = mlp_stack(len(widths), inner_widths=widths, with_scopes=with_scopes)
    index = flat_index(flat.regions[0].graph, frozenset())
    cuts = layer_spans(index, stacks, 0, len(stacks))
    assert [c.start for c in cuts] == [0, *(c.stop for c in cuts[:-1])]
    assert cuts[-1].stop == len(stacks)
    assert all(0 < c.stop - c.start <= LONG_OPS for c in cuts)
