"""The axis rules that a typing of a region names, looked up in the rule table."""

from collections.abc import Mapping, Sequence

from meshfold.errors import PlanMismatchError
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import OpGraph
from meshfold.ir.spmd import Layout, is_legal, layout_text
from meshfold.ir.strategy import RegionTyping
from meshfold.passes.rules.expert_axis import dispatched_rule, dispatched_values
from meshfold.passes.rules.ops.experts import DISPATCH_OPS
from meshfold.passes.rules.table import (
    AxisRule,
    refined_rules,
    region_rules,
    rules_inside,
    typing_of,
)


def typed_rules(
    graph: OpGraph, typed: RegionTyping, name: str, mesh: Mesh
) -> Sequence[tuple[AxisRule, ...]]:
    """The rules that the typing of a region of that name names, held against the layouts it gives.

    Raises PlanMismatchError.
    """
    table = region_rules(graph, mesh.sizes)
    away = dispatched_values(graph)
    chosen = []
    for k, (op, typing) in enumerate(zip(graph.ops, typed.ops, strict=True)):
        where = f"region {name}, op {k} {op.target}"
        rules: list[AxisRule] = []
        for axis, wanted in enumerate(typing.rules):
            found = {rule.name: rule for rule in table[k][axis]}
            if wanted not in found:
                found |= rules_inside(graph, k, table[k], mesh.sizes, axis)
            if wanted not in found:
                rules_of_axis = tuple(found.values())
                found |= {
                    more.name: more
                    for rule in rules_of_axis
                    for more in refined_rules(graph, k, rule, mesh.sizes[axis])
                }
            if wanted not in found:
                found |= _rules_at_experts(graph, k, found, mesh.sizes[axis], away)
            if wanted not in found:
                raise PlanMismatchError(
                    f"{where}: no rule {wanted!r} on axis {mesh.names[axis]}; "
                    f"it has {', '.join(found)}"
                )
            rules.append(found[wanted])
        expected = typing_of(graph, k, tuple(rules))
        if expected != typing:
            given = [layout_text(layout) for layout in (*typing.inputs, *typing.outputs)]
            right = [layout_text(layout) for layout in (*expected.inputs, *expected.outputs)]
            raise PlanMismatchError(
                f"{where}: rules {','.join(typing.rules)} give {' '.join(right)}, "
                f"the plan says {' '.join(given)}"
            )
        for v, layout in zip(
            (*op.operands, *op.outputs), (*typing.inputs, *typing.outputs), strict=True
        ):
            check_layout(where, graph.values[v].shape, layout, mesh)
        chosen.append(tuple(rules))
    return chosen


def _rules_at_experts(
    graph: OpGraph,
    op_index: int,
    rules: Mapping[str, AxisRule],
    size: int,
    away: frozenset[int],
) -> dict[str, AxisRule]:
    """The rules by name of an axis of `size` ranks for rows that are with their experts."""
    op = graph.ops[op_index]
    if op.target not in DISPATCH_OPS and away.isdisjoint(op.operands):
        return {}
    found = (dispatched_rule(graph, op, rule, size, away) for rule in rules.values())
    return {rule.name: rule for rule in found if rule is not None}


def check_layout(where: str, shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> None:
    if not is_legal(shape, layout, mesh.sizes):
        raise PlanMismatchError(
            f"{where}: {layout_text(layout)} does not cut {list(shape)} evenly on {mesh}"
        )
