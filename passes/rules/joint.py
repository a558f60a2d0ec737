"""Domains of the region search: which joint rules an op may take, and the layouts they mean.

On a mesh of several axes a rule of an op is one axis rule per axis (table.py). A joint
rule is legal when every operand and output gets a layout that its tensor can have (spmd.is_legal).
Ops whose results depend on nothing but constants run whole: they have one joint rule, Invariant on
every axis.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from meshfold.ir.op_graph import Dependence, OpGraph
from meshfold.ir.spmd import Layout, is_legal
from meshfold.passes.rules.table import AxisRule

RuleTable = tuple[tuple[tuple[AxisRule, ...], ...], ...]
"""[op][axis] -> the legal axis rules, as passes.rules.table.region_rules gives them."""


@dataclass(frozen=True, slots=True, eq=False)
class OpDomain:
    """The joint rules of one op, in a fixed order.

    rules[c]: one axis rule per axis; inputs[k][c]: layout of operand k under joint rule c;
    outputs[k][c]: of output k.
    """

    rules: tuple[tuple[AxisRule, ...], ...]
    inputs: tuple[tuple[Layout, ...], ...]
    outputs: tuple[tuple[Layout, ...], ...]

    def __len__(self) -> int:
        return len(self.rules)


class Legality:
    """spmd.is_legal on one mesh, remembered: layouts repeat over ops of equal shapes."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self._known: dict[tuple[tuple[int, ...], Layout], bool] = {}

    def __call__(self, shape: tuple[int, ...], layout: Layout) -> bool:
        key = (shape, layout)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = is_legal(shape, layout, self.sizes)
        return found


def is_constant_op(graph: OpGraph, op_index: int) -> bool:
    """Whether the op reads and makes nothing but constants, so that every rank computes it whole.
    (new_zeros of a batch makes a constant, but reads the batch for its shape and device.)"""
    op = graph.ops[op_index]
    values = (graph.values[v] for v in (*op.operands, *op.outputs))
    return all(value.depends is Dependence.CONSTANT for value in values)


def op_domains(
    graph: OpGraph,
    table: RuleTable,
    legal: Legality,
    fixed: Mapping[int, Sequence[Collection[str]]] | None = None,
) -> tuple[OpDomain, ...]:
    """The domain of every op. `fixed` maps an axis to rule names per op: on that axis the op
    takes one of these."""
    return tuple(
        _domain(graph, k, _axis_rules(graph, k, per_axis, fixed or {}), legal)
        for k, per_axis in enumerate(table)
    )


def _axis_rules(
    graph: OpGraph,
    op_index: int,
    per_axis: Sequence[tuple[AxisRule, ...]],
    fixed: Mapping[int, Sequence[Collection[str]]],
) -> list[tuple[AxisRule, ...]]:
    constant = is_constant_op(graph, op_index)
    out = []
    for axis, rules in enumerate(per_axis):
        names = ("I",) if constant else fixed[axis][op_index] if axis in fixed else None
        out.append(tuple(r for r in rules if names is None or r.name in names))
        assert out[-1], f"{graph.ops[op_index].target} has no rule {names}"
    return out


def _domain(
    graph: OpGraph, op_index: int, per_axis: Sequence[tuple[AxisRule, ...]], legal: Legality
) -> OpDomain:
    op = graph.ops[op_index]
    in_shapes = [graph.values[v].shape for v in op.operands]
    out_shapes = [graph.values[v].shape for v in op.outputs]
    joint = []
    for rules in itertools.product(*per_axis):
        inputs = tuple(tuple(r.inputs[k] for r in rules) for k in range(len(in_shapes)))
        outputs = tuple(tuple(r.outputs[k] for r in rules) for k in range(len(out_shapes)))
        # The rule of one axis is legal by itself: only two that cut something can be in conflict.
        fits = sum(r.splits_work for r in rules) < 2 or (
            all(map(legal, in_shapes, inputs)) and all(map(legal, out_shapes, outputs))
        )
        if fits:
            joint.append((rules, inputs, outputs))
    assert joint, f"{op.target} has no legal joint rule"
    return OpDomain(
        rules=tuple(k[0] for k in joint),
        inputs=tuple(tuple(k[1][i] for k in joint) for i in range(len(in_shapes))),
        outputs=tuple(tuple(k[2][i] for k in joint) for i in range(len(out_shapes))),
    )
