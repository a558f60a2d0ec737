"""The rules of a context parallel axis: what it may shard, and where.

On such an axis parameters are unsharded: of the rules of an op (passes/rules/table.py) those remain
that read no shard of one. Besides the rule that shards query rows, attention gets the one that has
keys and values go round (refined_rules). Three steps follow:

inside    tp may shard the same label, so cp goes inside wherever that divides, whether tp does so
          or not: it is the same work at the same price, and one place to ask about instead of two
          (moved_inside).

              tp, 4 ranks    s     Shard(1)      rows in 4 shards
              cp inside      s/4   Shard(1, 4)   each of them again

worth it  A shard is worth making where some op with products (contractions, attention) shares its
          work by it, or by what it turns into. Shards are nodes, a rule joins those it reads and
          makes; a component without such an op saves work on the memory alone, and its rules go
          (shards_of_products). Heads and rows stay, the dims of the model and inside a head go.

sums      An op goes on with a pending sum only where an op before it may leave one (_with_sums).
"""

from collections.abc import Collection, Iterator, Sequence

import networkx as nx

from meshfold.cost_models.op_costs.compute import PRODUCTS, op_name
from meshfold.ir.op_graph import OpGraph, SlotKind
from meshfold.ir.spmd import PARTIAL, SpmdType
from meshfold.passes.rules.joint import RuleTable
from meshfold.passes.rules.table import AxisRule, refined_rules, rule_inside

ShardOf = tuple[int, SpmdType]
"""(value, its shard)."""


def context_rules(
    graph: OpGraph,
    table: RuleTable,
    sizes: Sequence[int],
    *,
    cp_axis: int,
    tp_axis: int | None,
    crossing: Collection[ShardOf],
) -> RuleTable:
    """`table` with the rules of axis `cp_axis` as the module docstring has them. crossing: shards
    that stay in any case, since values cross the region's boundary in them."""
    if tp_axis is not None:
        table = moved_inside(graph, table, sizes, inner=cp_axis, outer=tp_axis)
    rules = [
        [rule for rule in found if _reads_unsharded_parameters(graph, k, rule)]
        for k, found in enumerate(_with_refined(graph, table, sizes, cp_axis))
    ]
    worth = shards_of_products(graph, rules, crossing)
    rules = [
        [rule for rule in of_op if all(shard in worth for shard in _shards(graph, k, rule))]
        for k, of_op in enumerate(rules)
    ]
    return tuple(
        (*per_axis[:cp_axis], of_op, *per_axis[cp_axis + 1 :])
        for per_axis, of_op in zip(table, _with_sums(graph, rules), strict=True)
    )


def moved_inside(
    graph: OpGraph, table: RuleTable, sizes: Sequence[int], *, inner: int, outer: int
) -> RuleTable:
    """`table` with every rule of axis `inner` moved inside of the shards of axis `outer`, where all
    of its tensors divide over both. Rules that mean the same types are given once."""
    out = []
    for k, per_axis in enumerate(table):
        moved = (
            rule_inside(graph, k, rule, sizes[outer], sizes[inner]) or rule
            for rule in per_axis[inner]
        )
        distinct = {(rule.inputs, rule.outputs): rule for rule in moved}
        rules: tuple[AxisRule, ...] = tuple(distinct.values())
        out.append((*per_axis[:inner], rules, *per_axis[inner + 1 :]))
    return tuple(out)


def shards_of_products(
    graph: OpGraph, rules: Sequence[Sequence[AxisRule]], crossing: Collection[ShardOf]
) -> frozenset[ShardOf]:
    """The shards of all components that have one of `crossing`, or a rule of an op with products.
    rules: of one axis, per op."""
    joined = nx.Graph()
    joined.add_nodes_from(crossing)
    worth = set(crossing)
    for k, of_op in enumerate(rules):
        for rule in of_op:
            shards = _shards(graph, k, rule)
            nx.add_path(joined, shards)
            if op_name(graph.ops[k].target) in PRODUCTS:
                worth.update(shards)
    components = (c for c in nx.connected_components(joined) if not worth.isdisjoint(c))
    return frozenset().union(*components)


def _with_refined(
    graph: OpGraph, table: RuleTable, sizes: Sequence[int], axis: int
) -> Iterator[list[AxisRule]]:
    """The rules of an axis for each op, and those that shard more than one of them does."""
    for k, per_axis in enumerate(table):
        rules = per_axis[axis]
        more = (found for rule in rules for found in refined_rules(graph, k, rule, sizes[axis]))
        yield [*rules, *more]


def _with_sums(
    graph: OpGraph, rules: Sequence[Sequence[AxisRule]]
) -> Iterator[tuple[AxisRule, ...]]:
    """The rules of each op without those that go on with pending sums that no op before makes."""
    pending: set[int] = set()
    for op, of_op in zip(graph.ops, rules, strict=True):
        allowed = []
        for rule in of_op:
            read = {v for v, t in zip(op.operands, rule.inputs, strict=True) if t == PARTIAL}
            makes = rule.splits_work or not pending.isdisjoint(read)
            if not read or makes:
                allowed.append(rule)
                typed = zip(op.outputs, rule.outputs, strict=True)
                pending.update(v for v, t in typed if t == PARTIAL)
        yield tuple(allowed)


def _shards(graph: OpGraph, op_index: int, rule: AxisRule) -> list[ShardOf]:
    """What a rule reads and makes as shards."""
    op = graph.ops[op_index]
    values = zip((*op.operands, *op.outputs), (*rule.inputs, *rule.outputs), strict=True)
    return [(v, t) for v, t in values if t.is_shard]


def _reads_unsharded_parameters(graph: OpGraph, op_index: int, rule: AxisRule) -> bool:
    """Whether every parameter that the op reads is the same on all ranks of the axis."""
    return all(
        t.kind in ("I", "R")
        for v, t in zip(graph.ops[op_index].operands, rule.inputs, strict=True)
        if v < len(graph.slots) and graph.slots[v].kind is SlotKind.PARAMETER
    )
