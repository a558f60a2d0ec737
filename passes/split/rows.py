"""The sequence followed through the op rules on a free axis: what can run row by row.

    norms, products with weights, what is element by element     rows of a chunk alone
    experts, and the way to them and back                        rows of a chunk alone
    attention, and whatever else needs all rows                  all rows, its operands joined

Ops are met in order; one stays split where a rule reads what is split as it is, needs no
communication and makes no pending sum. So no op runs on rows whose results would have to be added
up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from meshfold.ir.op_graph import OpGraph, SlotKind
from meshfold.ir.spmd import INVARIANT, Layout, Shard, SpmdType
from meshfold.ir.strategy import OpTyping, RegionTyping
from meshfold.passes.rules.ops.experts import DISPATCH_OPS
from meshfold.passes.rules.table import AxisRule, region_rules, rule_locals

ROWS = 1
"""The dim of the sequence in activations [batch, sequence, hidden]."""


@dataclass(frozen=True)
class SequenceTyping:
    """typing: of a region on the free axis; length: rows of the sequence."""

    typing: RegionTyping
    length: int


def follow_rows(graph: OpGraph, num_chunks: int) -> SequenceTyping | None:
    """What a region does where its sequence is split into `num_chunks`; None if it has no sequence.

    The sequence is that of its largest activation, and of all that arrive with as many rows.
    """
    arriving = [
        v
        for v, slot in enumerate(graph.slots)
        if slot.kind is SlotKind.VALUE and graph.values[v].is_float
    ]
    shapes = [graph.values[v].shape for v in arriving if len(graph.values[v].shape) == ROWS + 2]
    if not shapes:
        return None
    widest = max(shapes, key=lambda shape: (shape[0] * shape[1] * shape[2], shape))
    if widest[ROWS] % num_chunks:
        return None
    types: list[SpmdType] = [INVARIANT] * len(graph.values)
    for v in arriving:
        if graph.values[v].shape[:-1] == widest[:-1]:
            types[v] = Shard(ROWS)
    table = region_rules(graph, (num_chunks,))
    slots: tuple[Layout, ...] = tuple((t,) for t in types[: len(graph.slots)])
    ops = [_typed(graph, k, table[k][0], types) for k in range(len(graph.ops))]
    outputs: tuple[Layout, ...] = tuple((types[v],) for v in graph.outputs)
    return SequenceTyping(RegionTyping(slots, tuple(ops), outputs), widest[ROWS])


def _typed(graph: OpGraph, k: int, rules: Sequence[AxisRule], types: list[SpmdType]) -> OpTyping:
    """What op `k` does; writes down the types of its results."""
    op = graph.ops[k]
    arrived = [types[v] for v in op.operands]
    if any(t.is_shard for t in arrived):
        for rule in rules:
            typing = OpTyping(
                (rule.name,), tuple((t,) for t in rule.inputs), tuple((t,) for t in rule.outputs)
            )
            if _is_row_by_row(graph, k, rule, arrived) and _is_plain(graph, k, typing):
                for v, t in zip(op.outputs, rule.outputs, strict=True):
                    types[v] = t
                return typing
    unsharded = ((INVARIANT,),)
    return OpTyping((rules[0].name,), unsharded * len(op.operands), unsharded * len(op.outputs))


def _is_plain(graph: OpGraph, k: int, typing: OpTyping) -> bool:
    """Whether the op can run on a chunk of the rows: nothing in it knows where they are. Rows
    travel to their experts whoever goes with them."""
    if graph.ops[k].target in DISPATCH_OPS:
        return True
    return all(local == "plain" for local in rule_locals(graph, k, typing))


def _is_row_by_row(graph: OpGraph, k: int, rule: AxisRule, arrived: Sequence[SpmdType]) -> bool:
    """Whether a rule takes what arrives as it is; what arrives unsharded may be sliced,
    but not a parameter."""
    if rule.comm or not all(t.is_shard and not t.padded for t in rule.outputs):
        return False
    op, is_used = graph.ops[k], False
    for v, t, wanted in zip(op.operands, arrived, rule.inputs, strict=True):
        if t.is_shard:
            if wanted != t:
                return False
            is_used = True
        elif wanted.is_shard and (wanted.padded or _is_parameter(graph, v)):
            return False
        elif wanted.kind == "P":
            return False
    return is_used


def _is_parameter(graph: OpGraph, v: int) -> bool:
    return v < len(graph.slots) and graph.slots[v].kind is SlotKind.PARAMETER
