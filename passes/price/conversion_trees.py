"""The conversion trees of a typed region: what layout each demanded layout is converted from.

A value wanted in several layouts is converted along the cheapest tree: with D the wanted layouts
and s the native one, over subsets A of D,

    best(A) = min over t in A and u in (A - t) + s of  best(A - t) + cost(u -> t)

(every tree grows by one layout at a time, so this is exact; 2^|D| |D|^2 steps, |D| is a handful).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from meshfold.ir.op_graph import OpGraph, SlotKind, Value
from meshfold.ir.spmd import Layout
from meshfold.ir.strategy import RegionTyping
from meshfold.passes.graph.typed import layouts_of_values
from meshfold.passes.price.conversions import ConversionCosts, conversion_cost, converts
from meshfold.passes.price.parameter_groups import used_layout

_Tree = tuple[int, int, tuple[tuple[int, int], ...]]
"""(picoseconds, edges that do not start at the native layout, edges)."""

_NO_CONVERSION = 10**24
"""Picoseconds where there is no conversion."""


def plan_conversions(
    value: Value, native: Layout, demands: Sequence[Layout], costs: ConversionCosts
) -> tuple[tuple[Layout, Layout], ...]:
    """The cheapest tree of conversions that gives every demanded layout from `native`.

    Edges (from, to) in emission order: an edge's `from` is `native` or an earlier edge's `to`.
    Deterministic: of equally cheap trees the one with the most conversions straight from native.
    """
    wanted = sorted({d for d in demands if d != native})
    if len(wanted) < 2:
        return tuple((native, target) for target in wanted)
    nodes = [native, *wanted]
    # Integer picoseconds: sums in another order must not differ in the last bit.
    price = [
        [
            round(conversion_cost(value, u, t, costs).total_s * 1e12)
            if converts(u, t)
            else _NO_CONVERSION
            for t in nodes
        ]
        for u in nodes
    ]
    best: dict[int, _Tree] = {0: (0, 0, ())}
    everything = range(1, len(nodes))
    for members in range(1, 2 ** len(wanted)):
        inside = [t for t in everything if members >> (t - 1) & 1]
        options: list[_Tree] = []
        for t in inside:
            cost, indirect, edges = best[members & ~(1 << (t - 1))]
            for u in [0, *(u for u in inside if u != t)]:
                options.append((cost + price[u][t], indirect + (u > 0), (*edges, (u, t))))
        best[members] = min(options)
    return tuple((nodes[u], nodes[t]) for u, t in best[2 ** len(wanted) - 1][2])


def reachable(native: Layout, demands: Iterable[Layout]) -> frozenset[Layout]:
    """The layouts of `demands` that a tree from `native` gives: what no direct conversion makes
    may be made from another layout that is demanded, too."""
    found, rest = {native}, set(demands)
    while new := {t for t in rest - found if any(converts(u, t) for u in found)}:
        found |= new
    return frozenset(found)


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
