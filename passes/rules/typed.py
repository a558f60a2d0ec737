"""The axis rules that a typing of a region names, looked up in the rule table."""

from collections.abc import Mapping, Sequence
from functools import cached_property

from meshfold.errors import PlanMismatchError
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import OpGraph
from meshfold.ir.spmd import Layout, is_legal, layout_text
from meshfold.ir.strategy import OpTyping, RegionTyping
from meshfold.passes.graph.typed import value_name
from meshfold.passes.rules.expert_axis import dispatched_rule, dispatched_values
from meshfold.passes.rules.ops.experts import DISPATCH_OPS
from meshfold.passes.rules.ops.shards import (
    Divisions,
    ShardCandidate,
    Shardings,
    candidate_of,
    new_shardings,
)
from meshfold.passes.rules.table import (
    AxisRule,
    op_labels,
    op_rules,
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
    found = _NamedRules(graph, mesh)
    chosen = []
    for k, (op, typing) in enumerate(zip(graph.ops, typed.ops, strict=True)):
        where = f"region {name}, op {k} {op.target}"
        for v, layout in zip(
            (*op.operands, *op.outputs), (*typing.inputs, *typing.outputs), strict=True
        ):
            check_layout(f"{where}, {value_name(graph, v)}", graph.values[v].shape, layout, mesh)
        rules = tuple(found.rule(k, typing, axis, where) for axis in range(len(typing.rules)))
        expected = typing_of(graph, k, rules)
        if expected != typing:
            given = [layout_text(layout) for layout in (*typing.inputs, *typing.outputs)]
            right = [layout_text(layout) for layout in (*expected.inputs, *expected.outputs)]
            raise PlanMismatchError(
                f"{where}: rules {','.join(typing.rules)} give {' '.join(right)}, "
                f"the plan says {' '.join(given)}"
            )
        chosen.append(rules)
    return chosen


class _NamedRules:
    """Finds rules of a region by their names. The table asks for all shards of all ops; a typing
    says which it means, so the table is made only for a name that those do not lead to."""

    def __init__(self, graph: OpGraph, mesh: Mesh) -> None:
        self.graph = graph
        self.mesh = mesh
        self.labels = [op_labels(graph, op) for op in graph.ops]
        self.divisions = {size: Divisions(size) for size in mesh.sizes}

    @cached_property
    def table(self) -> tuple[tuple[tuple[AxisRule, ...], ...], ...]:
        return region_rules(self.graph, self.mesh.sizes)

    @cached_property
    def away(self) -> frozenset[int]:
        """Values whose rows are with their experts."""
        return dispatched_values(self.graph)

    def rule(self, k: int, typing: OpTyping, axis: int, where: str) -> AxisRule:
        """The rule that the typing of op k names on an axis. Raises PlanMismatchError, `where`
        first."""
        wanted = typing.rules[axis]
        for rule in self._asked_for(k, typing, axis):
            if rule.name == wanted:
                return rule
        graph, size = self.graph, self.mesh.sizes[axis]
        found = {rule.name: rule for rule in self.table[k][axis]}
        if wanted not in found:
            found |= rules_inside(graph, k, self.table[k], self.mesh.sizes, axis)
        if wanted not in found:
            rules_of_axis = tuple(found.values())
            found |= {
                more.name: more
                for rule in rules_of_axis
                for more in refined_rules(graph, k, rule, size)
            }
        if wanted not in found:
            found |= _rules_at_experts(graph, k, found, size, self.away)
        if wanted not in found:
            raise PlanMismatchError(
                f"{where}: no rule {wanted!r} on axis {self.mesh.names[axis]}; "
                f"it has {', '.join(found)}"
            )
        return found[wanted]

    def _asked_for(self, k: int, typing: OpTyping, axis: int) -> tuple[AxisRule, ...]:
        """The rules of op k where its shards on an axis are all that is asked for."""
        graph, op, spec = self.graph, self.graph.ops[k], self.labels[k]
        divisions = self.divisions[self.mesh.sizes[axis]]
        values = *op.operands, *op.outputs
        asked: dict[int, set[ShardCandidate]] = {v: set() for v in values}
        for v, layout in zip(values, (*typing.inputs, *typing.outputs), strict=True):
            if layout[axis].kind == "S":
                asked[v].add(candidate_of(graph.values[v].shape, layout[axis]))
        shardings: Shardings = {}
        if spec is not None and divisions.size > 1 and any(asked.values()):
            new_shardings(graph, op, spec, divisions, asked, shardings)
        return op_rules(graph, op, spec, divisions.size, shardings)


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
