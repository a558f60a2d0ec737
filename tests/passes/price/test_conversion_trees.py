"""From which layout every demanded layout of a typed region is converted."""

import pytest
from support.graphs.op_graphs import costs_on, mlp

from meshfold.ir.spmd import parse_layout
from meshfold.ir.strategy import OpTyping, RegionTyping
from meshfold.passes.price.conversion_trees import conversion_trees


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
