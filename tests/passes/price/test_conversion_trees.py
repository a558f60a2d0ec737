"""From which layout every demanded layout of a typed region is converted."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.graphs.layouts import FlatCosts
from support.graphs.op_graphs import costs_on, mlp
from support.graphs.ops import mesh_of

from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import Value
from meshfold.ir.spmd import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Layout,
    PaddedShard,
    Shard,
    is_legal,
    parse_layout,
)
from meshfold.ir.strategy import OpTyping, RegionTyping
from meshfold.passes.price.conversion_trees import (
    conversion_trees,
    plan_conversions,
    reachable,
)
from meshfold.passes.price.conversions import conversion_cost, converts

X = Value((8, 16), "float32", requires_grad=True)
TYPES = (INVARIANT, REPLICATE, PARTIAL, Shard(0), Shard(0, 2), Shard(1))
LAYOUTS = [
    layout for layout in itertools.product(TYPES, TYPES) if is_legal(X.shape, layout, (2, 2))
]


UNEVEN = [
    layout
    for layout in itertools.product((*TYPES[:3], Shard(1), PaddedShard(0)), TYPES[:4])
    if is_legal(X.shape, layout, (3, 2))
]
"""With shards of 8 rows over 3 ranks, which are padded."""


def layouts(*texts: str):
    return tuple(map(parse_layout, texts))


@pytest.mark.parametrize("arriving", ["I", "P", "S1"])
@pytest.mark.parametrize("stored, root", [("I", "R"), ("S0", "S0")])
def test_values_start_where_they_arrive_and_parameters_where_the_runtime_gives_them(
    arriving: str, stored: str, root: str
) -> None:
    _, costs, _ = costs_on(1, 2)
    graph = mlp()  # x, up, down -> linear, relu, linear
    ops = tuple(
        OpTyping(("rule",), layouts(*inputs), layouts(output))
        for inputs, output in ((("R", root), "R"), ("R", "R"), (("R", "R"), "P"))
    )
    typing = RegionTyping(layouts("I", stored, "S0"), ops, layouts("I"))
    parents, parameters = conversion_trees(graph, typing, layouts(arriving, stored, "S0"), costs)
    (x,), (given,), (used, gathered), (pending, leaving) = (
        layouts(*texts) for texts in (["R"], [arriving], [root, "R"], ["P", "I"])
    )
    assert parents == {(0, x): given, (graph.outputs[0], leaving): pending}
    assert parameters == [(1, used), (2, gathered)]


def cheapest_by_brute_force(native: Layout, demands: Sequence[Layout], mesh: Mesh) -> float:
    """Every choice of a parent for every demand that makes a tree."""
    nodes = [native, *demands]
    best = float("inf")
    for parents in itertools.product(range(len(nodes)), repeat=len(demands)):
        if not all(_reaches_root(k, parents) for k in range(len(demands))):
            continue
        total = sum(
            conversion_cost(X, nodes[p], demands[k], FlatCosts(mesh)).total_s
            for k, p in enumerate(parents)
        )
        best = min(best, total)
    return best


def _reaches_root(k: int, parents: Sequence[int]) -> bool:
    for _ in parents:
        if parents[k] == 0:
            return True
        k = parents[k] - 1
    return False


@given(
    st.sampled_from(LAYOUTS),
    st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=3, unique=True),
)
def test_trees_are_as_cheap_as_any(native: Layout, demands: list[Layout]) -> None:
    mesh = mesh_of(2, 2)
    edges = plan_conversions(X, native, demands, FlatCosts(mesh))
    made = {native}
    for source, target in edges:
        assert source in made and target not in made
        made.add(target)
    assert made == {native, *demands}
    total = sum(conversion_cost(X, s, t, FlatCosts(mesh)).total_s for s, t in edges)
    wanted = [d for d in demands if d != native]
    assert total == pytest.approx(cheapest_by_brute_force(native, wanted, mesh), abs=1e-11)


def _by_trees(native: Layout, demands: Sequence[Layout]) -> set[Layout]:
    """Every choice of a parent for every demand, of the demands that hang on native by
    conversions that there are."""
    found: set[Layout] = set()
    nodes = [native, *demands]
    for parents in itertools.product(range(len(nodes)), repeat=len(demands)):
        for k in range(len(demands)):
            path = [k + 1]
            while path[-1] and len(path) <= len(demands):
                path.append(parents[path[-1] - 1])
            steps = zip(path[1:], path, strict=False)
            if path[-1] == 0 and all(converts(nodes[a], nodes[b]) for a, b in steps):
                found.add(demands[k])
    return found


@given(
    st.sampled_from(UNEVEN),
    st.lists(st.sampled_from(UNEVEN), min_size=1, max_size=3, unique=True),
)
def test_padded_shards_are_made_of_what_else_is_demanded(
    native: Layout, demands: list[Layout]
) -> None:
    wanted = [d for d in demands if d != native]
    assert reachable(native, wanted) == {native, *_by_trees(native, wanted)}
    made = [d for d in wanted if d in reachable(native, wanted)]
    edges = plan_conversions(X, native, made, FlatCosts(mesh_of(3, 2)))
    assert all(converts(*edge) for edge in edges)


def test_users_of_one_layout_share_a_conversion() -> None:
    demands = [(REPLICATE,)] * 3
    assert plan_conversions(X, (Shard(0),), demands, FlatCosts(mesh_of(2))) == (
        ((Shard(0),), (REPLICATE,)),
    )


def test_a_gathered_value_is_sliced_instead_of_exchanged() -> None:
    edges = plan_conversions(X, (PARTIAL,), [(REPLICATE,), (INVARIANT,)], FlatCosts(mesh_of(2)))
    assert edges == (((PARTIAL,), (INVARIANT,)), ((INVARIANT,), (REPLICATE,)))
