"""The conversion trees of a typed region: what layout each demanded layout is converted from."""

from dataclasses import replace

from meshfold.ir.op_graph import OpGraph, SlotKind
from meshfold.ir.spmd import Layout
from meshfold.ir.strategy import RegionTyping
from meshfold.passes.graph.typed import layouts_of_values
from meshfold.passes.price.conversions import ConversionCosts, plan_conversions
from meshfold.passes.price.parameter_groups import used_layout


def conversion_trees(
    graph: OpGraph, typing: RegionTyping, arriving: tuple[Layout, ...], costs: ConversionCosts
) -> tuple[dict[tuple[int, Layout], Layout], list[tuple[int, Layout]]]:
    """(the layout that each (value, layout) is converted from, the parameter slots with each layout
    that the runtime gives them). arriving: of each slot the layout in which its value arrives.

    Trees start at the layout a value has, those of a parameter at each of its runtime layouts.
    """
    parents: dict[tuple[int, Layout], Layout] = {}
    parameters: list[tuple[int, Layout]] = []
    layouts = layouts_of_values(graph, replace(typing, slots=arriving))
    for v, (native, demands) in enumerate(layouts):
        is_parameter = v < len(graph.slots) and graph.slots[v].kind is SlotKind.PARAMETER
        by_root: dict[Layout, list[Layout]] = {}
        for demand in demands:
            root = used_layout(native, demand, costs.mesh) if is_parameter else native
            by_root.setdefault(root, []).append(demand)
        for root, wanted in by_root.items():
            edges = plan_conversions(graph.values[v], root, wanted, costs)
            parents.update({(v, target): source for source, target in edges})
        if is_parameter:
            parameters += [(v, root) for root in by_root]
    return parents, parameters
