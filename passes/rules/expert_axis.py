"""Rules of an axis whose ranks share the experts: rows are dispatched to the weights and back once.

On such an axis every op goes on with what dp does, inside of its shards. Between dispatch and
combine rows are not where the batch puts them but with their experts (the type Experts), and there
the rule of an op is the one that takes Experts for Shard(0):

    dispatch        Shard(0,g)                 -> Experts(g)    exchange of counts, then of rows;
                                                                of ids nothing: counts per expert
                                                                say them
    expert_linear   Experts(g), weight Shard(0) -> Experts(g)
    row by row      Experts(g)                 -> Experts(g)
    combine         Experts(g), ids Shard(0,g) -> Shard(0,g)    exchange of rows

Counts are exchanged once per ids, by the first op that reads them, and waited for where they are;
rows are exchanged while other ops run, if a schedule has any.

All of these in a region or none: no conversion leads to Experts or away from it. How many rows a
rank has there depends on the routing, so that no other axis may shard them (without_sharded_rows).
"""

from collections.abc import Sequence
from dataclasses import replace

from meshfold.ir.op_graph import ITEM_BYTES, FoldedGraph, Op, OpGraph, SlotKind
from meshfold.ir.spmd import Experts, Shard, SpmdType
from meshfold.passes.rules.expert_capacity import expert_products
from meshfold.passes.rules.joint import RuleTable
from meshfold.passes.rules.ops.experts import (
    COMBINE,
    DISPATCH,
    DISPATCH_OPS,
    DISPATCHED,
    EXPERT_LINEAR,
    EXPERT_LOAD,
)
from meshfold.passes.rules.ops.labels import RuleComm
from meshfold.passes.rules.table import AxisRule

_WEIGHT, _BIAS = 1, 3
"""Operands of expert_linear with a row per expert."""
_NUM_EXPERTS = 2
"""Argument of dispatch and combine."""


def shared_experts(folded: FoldedGraph) -> frozenset[int]:
    """Numbers of experts of products whose rows can be dispatched, or that have a capacity; none if
    dispatched rows would cross between regions."""
    found: set[int] = set()
    for region in folded.regions:
        graph = region.graph
        away = dispatched_values(graph)
        if not away.isdisjoint(graph.outputs):
            return frozenset()
        found.update(expert_products(graph).numbers.values())
        for op in graph.ops:
            if op.target == EXPERT_LINEAR and op.operands[0] in away:
                found.add(graph.values[op.operands[_WEIGHT]].shape[0])
    return frozenset(found)


def dispatched_values(graph: OpGraph) -> frozenset[int]:
    """The values between dispatch and combine."""
    away: set[int] = set()
    for op in graph.ops:
        if op.target == DISPATCH or (op.target != COMBINE and not away.isdisjoint(op.operands)):
            away.update(op.outputs)
    return frozenset(away)


def expert_rules(
    graph: OpGraph, chosen: Sequence[AxisRule], size: int
) -> tuple[tuple[AxisRule, ...], frozenset[int]]:
    """(rules, expert weights): the rules `chosen` for an axis of `size` ranks, one per op, with
    those of dispatched rows in place of theirs; slots of parameters stored as Shard(0) on the
    axis, since nothing but products of experts reads them. As they are where some op on the way
    cannot."""
    away = dispatched_values(graph)
    rules: list[AxisRule] = []
    weights: set[int] = set()
    for op, rule in zip(graph.ops, chosen, strict=True):
        if op.target not in DISPATCH_OPS and away.isdisjoint(op.operands):
            rules.append(rule)
            continue
        dispatched = dispatched_rule(graph, op, rule, size, away)
        if dispatched is None:
            return tuple(chosen), frozenset()
        rules.append(dispatched)
        if op.target == EXPERT_LINEAR:
            weights.update(op.operands[k] for k in _tables(op))
    return tuple(rules), frozenset(v for v in weights if _is_of_experts_alone(graph, v))


def dispatched_rule(
    graph: OpGraph, op: Op, rule: AxisRule, size: int, away: frozenset[int]
) -> AxisRule | None:
    """The rule that does for rows with their experts what `rule` does for shards of them; None if
    there is none, or if the number of experts does not divide."""
    if op.target in DISPATCH_OPS:
        (shard,) = set(rule.inputs) if len(set(rule.inputs)) == 1 else (None,)
    else:
        shard = next(t for v, t in zip(op.operands, rule.inputs, strict=True) if v in away)
    if shard is None or not shard.is_shard or shard.dim != 0:
        return None
    inputs = [_moved(v, t, shard, away) for v, t in zip(op.operands, rule.inputs, strict=True)]
    outputs = [_moved(v, t, shard, away) for v, t in zip(op.outputs, rule.outputs, strict=True)]
    if None in inputs or None in outputs:
        return None
    if op.target == EXPERT_LINEAR:
        if graph.values[op.operands[_WEIGHT]].shape[0] % size:
            return None
        for k in _tables(op):
            inputs[k] = Shard(0)
    elif op.target not in DISPATCH_OPS and any(
        t.is_shard for v, t in zip(op.operands, rule.inputs, strict=True) if v not in away
    ):
        return None
    place = f"/{shard.blocks}" if shard.blocks > 1 else ""
    return replace(
        rule,
        name=DISPATCHED + place,
        inputs=tuple(t for t in inputs if t is not None),
        outputs=tuple(t for t in outputs if t is not None),
        comm=_exchanges(graph, op, size) if op.target in DISPATCH_OPS else (),
        local="expert_linear" if op.target == EXPERT_LINEAR else rule.local,
        load=EXPERT_LOAD,
    )


def without_sharded_rows(graph: OpGraph, table: RuleTable, axis: int) -> RuleTable:
    """`table` without the rules of `axis` that shard rows which are with their experts."""
    away = dispatched_values(graph)
    out = []
    for op, per_axis in zip(graph.ops, table, strict=True):
        values = (*op.operands, *op.outputs)
        allowed = tuple(
            rule
            for rule in per_axis[axis]
            if not any(
                v in away and t.dim == 0
                for v, t in zip(values, (*rule.inputs, *rule.outputs), strict=True)
            )
        )
        out.append((*per_axis[:axis], allowed, *per_axis[axis + 1 :]))
    return tuple(out)


def _moved(v: int, t: SpmdType, shard: SpmdType, away: frozenset[int]) -> SpmdType | None:
    """The type of a value; None if it is dispatched and is not sharded as `shard`."""
    if v not in away:
        return t
    return Experts(shard.blocks) if t == shard else None


def _is_of_experts_alone(graph: OpGraph, v: int) -> bool:
    """Whether a value is a parameter that only products of experts read."""
    is_parameter = v < len(graph.slots) and graph.slots[v].kind is SlotKind.PARAMETER
    return is_parameter and all(graph.ops[k].target == EXPERT_LINEAR for k in graph.users[v])


def _tables(op: Op) -> list[int]:
    """Operand positions with a row per expert."""
    return [k for k in (_WEIGHT, _BIAS) if k < len(op.operands)]


def _exchanges(graph: OpGraph, op: Op, size: int) -> tuple[RuleComm, ...]:
    """Counts, then rows, as many as the busiest rank gets; in backward the gradient of the rows."""
    v, ids = op.operands
    rows = graph.values[v]
    num_bytes = int(rows.num_bytes * EXPERT_LOAD) // size
    num_experts = op.args[_NUM_EXPERTS]
    assert isinstance(num_experts, int)
    counts = RuleComm("all_to_all", num_experts * ITEM_BYTES["int64"], is_saved=True)
    there = RuleComm("all_to_all", num_bytes, is_asynchronous=True)
    back = RuleComm("all_to_all", num_bytes, is_backward=True, is_asynchronous=True)
    exchanges = [graph.ops[k] for k in graph.users[ids] if graph.ops[k].target in DISPATCH_OPS]
    found = [counts] if exchanges[0] is op else []
    found += [there] if v != ids else []
    found += [back] if rows.requires_grad else []
    return tuple(found)
