"""What of a typed region runs again in its backward: ops, and steps of conversions.

Full recomputation repeats a prefix of the region (passes/recompute.py). Selective recomputation
holds what is dear to make again and rebuilds the rest where the backward misses it (Korthikanti et
al. 2022, arXiv:2205.05198, section 5, for any op graph). Dear, so it stays, is what is made by

    products      matrix products, convolutions, attention
    collectives   that make no more than they read: all of them but all-gathers

The memory model decides the same on the local program, where probes say what autograd keeps
(cost_models/rebuild.py has the recurrence). Here tables say it, and an op that they do not list
counts as if it kept its result: the price may be too high by what ends a region, never too low.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from meshfold.cost_models.op_costs.compute import PRODUCTS, op_name
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import Op, OpGraph, Value
from meshfold.ir.spmd import Layout
from meshfold.ir.strategy import RegionTyping
from meshfold.passes.price.conversions import (
    ConversionCosts,
    Step,
    axis_conversion,
    conversion_steps,
    plan_conversions,
)
from meshfold.passes.recompute import KEEPS_NOTHING, KEEPS_OPERANDS, run_again

Edge = tuple[Layout, Layout]
Layouts = Sequence[tuple[Layout, Sequence[Layout]]]
"""Per value its native layout and those that are demanded of it."""

_STAY = frozenset({"all_reduce", "reduce_scatter", "all_to_all"})


def op_stays(op: Op) -> bool:
    """Whether selective recomputation holds what an op made."""
    return op_name(op.target) in PRODUCTS


def step_stays(step: Step, mesh: Mesh) -> bool:
    """Whether it holds what a step of a conversion made."""
    size = mesh.sizes[step.axis]
    return size > 1 and axis_conversion(step.source, step.target, size).forward in _STAY


@dataclass(frozen=True)
class Again:
    """ops: numbers of those that run again; demands: per value the layouts that the second run, or
    autograd, wants of it."""

    ops: Collection[int]
    demands: Sequence[Collection[Layout]]
    is_selective: bool

    def starts(
        self, v: int, value: Value, edges: Sequence[Edge], mesh: Mesh, costs: ConversionCosts
    ) -> Mapping[Layout, Layout]:
        """Of a tree of conversions of value number v what runs again: target of an edge -> layout
        from which it is made again: where the edge starts, or later, after its last step that
        stays. Edges that do not run again are left out."""
        if not self.is_selective:
            return _on_the_way({target: source for source, target in edges}, self.demands[v])
        return _starts(value, edges, self.demands[v], mesh, costs)


def _on_the_way(
    parents: Mapping[Layout, Layout], demands: Collection[Layout]
) -> dict[Layout, Layout]:
    """The edges of a tree that lead to `demands`."""
    found: dict[Layout, Layout] = {}
    for layout in demands:
        while layout in parents and layout not in found:
            found[layout] = parents[layout]
            layout = parents[layout]
    return found


def _starts(
    value: Value,
    edges: Sequence[Edge],
    demands: Collection[Layout],
    mesh: Mesh,
    costs: ConversionCosts,
) -> dict[Layout, Layout]:
    """The same, as far back as something stays."""
    found: dict[Layout, Layout] = {}
    parents: dict[Layout, Layout] = {}
    for source, target in edges:
        steps = conversion_steps(value, source, target, mesh, costs)
        found[target] = next((s.after for s in reversed(steps) if step_stays(s, mesh)), source)
        if found[target] == source:
            parents[target] = source
    reached = _on_the_way(parents, demands)
    wanted = {*demands, *reached.values()}
    return {target: start for target, start in found.items() if target in wanted}


def full_again(graph: OpGraph, typing: RegionTyping) -> Again:
    """What full recomputation repeats."""
    again = run_again(graph)
    demands: list[set[Layout]] = [set() for _ in graph.values]
    for op, chosen in zip(graph.ops[: again.num_prepared], typing.ops, strict=False):
        for v, layout in zip(op.operands, chosen.inputs, strict=True):
            demands[v].add(layout)
    return Again(range(again.num_ops), demands, is_selective=False)


def selective_again(
    graph: OpGraph, typing: RegionTyping, layouts: Layouts, mesh: Mesh, costs: ConversionCosts
) -> Again:
    """What selective recomputation rebuilds: module docstring and cost_models/rebuild.py."""
    if not any(map(op_stays, graph.ops)):
        return full_again(graph, typing)
    wanted: list[set[Layout]] = [set() for _ in graph.values]
    again = set()
    for k in reversed(range(len(graph.ops))):
        op = graph.ops[k]
        is_kept = op.target not in KEEPS_NOTHING
        is_kept &= any(graph.values[v].requires_grad for v in op.outputs)
        is_wanted = is_kept and op.target not in KEEPS_OPERANDS
        is_wanted |= any(
            _reaches_native(graph.values[v], layouts[v], wanted[v], mesh, costs) for v in op.outputs
        )
        if is_wanted and not op_stays(op):
            again.add(k)
        if is_kept or k in again:
            for v, layout in zip(op.operands, typing.ops[k].inputs, strict=True):
                wanted[v].add(layout)
    return Again(frozenset(again), wanted, is_selective=True)


def _reaches_native(
    value: Value,
    layouts: tuple[Layout, Sequence[Layout]],
    wanted: Collection[Layout],
    mesh: Mesh,
    costs: ConversionCosts,
) -> bool:
    """Whether the wanted layouts of a value are made from what its op gave, not from what a
    collective that stays made of it."""
    native, demands = layouts
    if native in wanted:
        return True
    if not wanted:
        return False
    edges = plan_conversions(value, native, demands, mesh, costs)
    return native in _starts(value, edges, wanted, mesh, costs).values()
